"""A bound on what goes on at one time, that many event loops may use one after another."""

import asyncio
from weakref import WeakKeyDictionary


class Slots:
    """`async with slots():` in any loop; each loop has `count` of its own.

    An asyncio.Semaphore belongs to the loop that first waits for it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of_loop = WeakKeyDictionary()

    def __call__(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            self._of_loop[loop] = asyncio.Semaphore(self.count)
        return self._of_loop[loop]
