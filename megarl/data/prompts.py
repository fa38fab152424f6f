"""An endless, seeded, resumable stream of batches of rows.

The order of an epoch follows from the seed and the epoch's number alone, so two numbers say
where a stream stands.

`megarl train` has one stream, on rank 0, whose pool runs the episodes of all replicas. A script
that gives each data-parallel rank rows of its own (`actor.prepare_batch`) makes a shard on each.
"""

import random
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


class PromptStream:
    """Batches of `batch_size` rows, epoch after epoch, each epoch in an order of its own.

    Rows that do not fill a batch of every shard at an epoch's end are left out of that epoch.

    Args:
      batch_size: of this shard; a step takes `batch_size * count` rows.
      shuffle: False is the rows' own order in every epoch.
      shard: (index, count). The batches of all shards of a step, in the order of their index,
        are the batch that one stream of `batch_size * count` gives.

    Raises:
      ValueError: fewer rows than a step takes, or not 0 <= index < count.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        index, count = shard
        if not 0 <= index < count:
            raise ValueError(f"shard must be (index, count) with 0 <= index < count, got {shard}")
        if not 1 <= batch_size * count <= len(rows):
            of_shards = f" in each of {count} shards" if count > 1 else ""
            raise ValueError(f"{len(rows)} rows do not fill one batch of {batch_size}{of_shards}")
        self.rows, self.batch_size, self.shuffle, self.seed = rows, batch_size, shuffle, seed
        self._offset, self._rows_per_step = index * batch_size, batch_size * count
        self.epoch = 0
        """Epochs finished."""
        self.position = 0
        """Rows that all shards have taken of the present epoch."""
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self._rows_per_step

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> list[Row]:
        if self.position + self._rows_per_step > len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        first = self.position + self._offset
        chosen = self._order[first : first + self.batch_size]
        self.position += self._rows_per_step
        return [self.rows[i] for i in chosen]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, and what must be equal for that to mean the same row.

        After as many batches each, the same in every shard.
        """
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": len(self.rows),
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the exact row where `state_dict` was taken.

        The batch size and the number of shards may differ.

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
