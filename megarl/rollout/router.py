"""Which server a request goes to: where its beginning is cached, unless that one is too busy.

    1  the server that has seen most of the request's tokens before (a turn, a request that goes
       on), if that is half of them or more
    2  the home of its id: where the first request of that id went (a group's samples)
    3  the one with the fewest outstanding tokens

Both 1 and 2 give way to 3 when their server has much more to do than the least busy one: a group
of 64 on an idle fleet is worth 8 prompts computed 8 times, not 7 idle servers.
"""

import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=Hashable)

BLOCK_TOKENS = 256
"""Beginnings are remembered at multiples of it."""
_MAX_HOMES = 16_384
_MAX_BLOCKS = 1 << 17
_LEAST_SHARE = 0.5
_BUSIER = 1.5
_SLACK_REQUESTS = 8
"""A cached beginning is worth up to 1.5 times the load of the least busy, and 8 requests more."""


class Router(Generic[S]):
    """Remembers where requests went. Servers are only keys here."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, S] = OrderedDict()
        self._blocks: OrderedDict[int, S] = OrderedDict()

    def choose(self, rid: str, tokens: Sequence[int], cost: float, loads: Mapping[S, float]) -> S:
        """The server for a request, one of `loads`.

        Args:
          tokens: what it continues.
          cost: what it adds to a load.
          loads: outstanding tokens of each server that may be chosen.
        """
        least = min(loads, key=lambda server: loads[server])
        limit = _BUSIER * loads[least] + _SLACK_REQUESTS * cost
        home = self._homes.get(rid)
        for server in (self._seen_at(tokens, loads), home):
            if server is not None and loads.get(server, limit) < limit:
                break
        else:
            server = least
        if home is None or home not in loads:
            self._homes[rid] = server
            _forget_oldest(self._homes, _MAX_HOMES)
        else:
            self._homes.move_to_end(rid)
        return server

    def learn(self, server: S, tokens: Sequence[int]) -> None:
        """`server` has computed these tokens from the first on."""
        for key in _keys(tokens):
            self._blocks[key] = server
            self._blocks.move_to_end(key)
        _forget_oldest(self._blocks, _MAX_BLOCKS)

    def forget(self, server: S) -> None:
        """It is gone, with its cache."""
        memories: tuple[OrderedDict[Any, S], ...] = (self._homes, self._blocks)
        for memory in memories:
            for key in [key for key, of in memory.items() if of == server]:
                del memory[key]

    def _seen_at(self, tokens: Sequence[int], loads: Mapping[S, float]) -> S | None:
        keys = _keys(tokens)
        for count in range(len(keys), 0, -1):
            if count * BLOCK_TOKENS < _LEAST_SHARE * len(tokens):
                return None
            server = self._blocks.get(keys[count - 1])
            if server is not None and server in loads:
                return server
        return None


def _keys(tokens: Sequence[int]) -> list[int]:
    """Of the first block, the first two, ...; equal for equal beginnings."""
    keys, key = [], 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array.array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()
        key = hash((key, block))
        keys.append(key)
    return keys


def _forget_oldest(memory: OrderedDict[Any, Any], limit: int) -> None:
    while len(memory) > limit:
        memory.popitem(last=False)
