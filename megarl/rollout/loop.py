"""A thread with an event loop, and the ways to wait for what runs there."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megarl.errors import EngineError, EngineTimeout

T = TypeVar("T")

LIMIT_S = 120.0
"""Of the start and of the end."""
_WAKE_S = 1.0


class LoopThread:
    """Runs `main` from `start` on; `main` returns after `stop`.

    Args:
      main: its argument says that it has started, its awaitable ends with `stop`.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[Callable[[], None], asyncio.Event], Coroutine[Any, Any, None]],
    ) -> None:
        self._name, self._main = name, main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._dead: EngineError | None = None

    def start(self) -> None:
        """EngineTimeout: `main` did not say that it has started."""
        started = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop, self._died = asyncio.Event(), asyncio.Event()
            await self._main(started.set, self._stop)

        self._thread = threading.Thread(
            target=lambda: asyncio.run(main()), name=self._name, daemon=True
        )
        self._thread.start()
        if not started.wait(LIMIT_S):
            raise EngineTimeout(f"the {self._name} loop did not start in {LIMIT_S} s")

    def stop(self) -> None:
        """EngineTimeout: `main` did not return. Nothing if it was not started."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            raise EngineTimeout(f"the {self._name} loop did not end in {LIMIT_S} s")
        self._loop = self._thread = None

    def die(self, error: EngineError) -> None:
        """From now on whoever waits gets this error. In the loop."""
        self._dead = error
        self._died.set()

    def run(
        self,
        coro: Coroutine[Any, Any, T],
        timeout_s: float | None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> T:
        """The result of `coro`, run on the loop, for a caller without one.

        Args:
          on_wake: called every second meanwhile, in the caller's thread. Its error ends `coro`.

        Raises:
          EngineTimeout: it is not done after `timeout_s`.
          EngineError: that of `die`.
        """
        assert self._loop is not None, "start() comes first"
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not concurrent.futures.wait([future], timeout=_WAKE_S).done:
                if self._dead is not None:
                    raise self._dead
                on_wake()
                if deadline_s is not None and time.monotonic() > deadline_s:
                    name = getattr(coro, "__qualname__", "a coroutine")
                    raise EngineTimeout(f"{name}: not done after {timeout_s} s on the loop")
        except BaseException:
            future.cancel()
            raise
        return future.result()

    async def run_from_another(self, coro: Coroutine[Any, Any, T]) -> T:
        """The result of `coro`, for a caller on a loop of its own; with that it is cancelled.

        Raises:
          EngineError: that of `die`, or this loop ends.
        """
        assert self._loop is not None, "start() comes first"
        future = asyncio.run_coroutine_threadsafe(self._unless_dead(coro), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise EngineError(f"the {self._name} loop has ended") from None

    async def _unless_dead(self, coro: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coro)
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((task, died), return_when=asyncio.FIRST_COMPLETED)
            if self._dead is not None and not task.done():
                raise self._dead
            return await task
        finally:
            task.cancel()
            died.cancel()
