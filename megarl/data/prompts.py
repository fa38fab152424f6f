"""An endless, seeded, resumable stream of batches of rows.

The order of an epoch follows from the seed and the epoch's number alone, so two numbers say
where a stream stands.
"""

import random
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


class PromptStream:
    """Batches of `batch_size` rows, epoch after epoch, each epoch in an order of its own.

    Rows that do not fill a batch at an epoch's end are left out of that epoch.

    Args:
      shuffle: False is the rows' own order in every epoch.

    Raises:
      ValueError: fewer rows than a batch.
    """

    def __init__(self, rows: Sequence[Row], *, batch_size: int, shuffle: bool, seed: int) -> None:
        if not 1 <= batch_size <= len(rows):
            raise ValueError(f"{len(rows)} rows do not fill one batch of {batch_size}")
        self.rows, self.batch_size, self.shuffle, self.seed = rows, batch_size, shuffle, seed
        self.epoch = 0
        """Epochs finished."""
        self.position = 0
        """Rows taken of the present epoch."""
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self.batch_size

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> list[Row]:
        if self.position + self.batch_size > len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        chosen = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return [self.rows[i] for i in chosen]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, and what must be equal for that to mean the same row."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": len(self.rows),
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the exact row where `state_dict` was taken. The batch size may differ.

        Raises:
          ValueError: the state is of other rows or of another order.
        """
        present = self.state_dict()
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != present[name]:
                raise ValueError(
                    f"a prompt stream with {name} {present[name]} cannot go on where one with "
                    f"{name} {state[name]} stood"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)
