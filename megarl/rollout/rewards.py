"""Rewards that can fail: no call can hang or kill a run, and each failure is counted.

A call that fails is tried again; one that fails `max_attempts` times is worth 0 or rejects the
episode, and each failed attempt is counted by reason. What a call is, is one of

  RewardPool   a function in processes of its own; one that is late loses its process
  AsyncReward  an `async def` in the rollout loop
  ThreadReward a function in threads of this process, which nothing can end
  RewardModel  a request to a model, in megarl/rollout/reward_model.py

Each belongs to one event loop.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from megarl.config.rewards import KEY_VARIABLES
from megarl.errors import MegarlError
from megarl.rollout.reward_worker import HEADER, encode_message
from megarl.rollout.slots import Slots

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 8 << 30
MAX_LEFT_THREADS = 32
_START_TIMEOUT_S = 120.0
"""A new process may take so long to import the function's module."""


class CallFailed(MegarlError):
    """One attempt at one call; the text begins with a reason that is counted.

    Args:
      is_final: another attempt would fail as well.
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class Reward(ABC):
    """Awaitable like an async reward function, with limits.

    Args:
      name: for messages.
      on_failure: what a call is worth that failed `max_attempts` times: "zero" is 0.0,
        "reject" is None.
      options: keyword arguments of each call; a row's own go before them.
      first_delay_s: before the second attempt; it doubles with each.
    """

    takes_messages: bool = False
    """Whether calls want the row's chat as `messages`."""

    def __init__(
        self,
        name: str,
        *,
        max_attempts: int,
        on_failure: Literal["zero", "reject"],
        options: dict[str, Any] | None = None,
        first_delay_s: float = 0.0,
    ) -> None:
        self.name, self.max_attempts, self.on_failure = name, max_attempts, on_failure
        self.failures: Counter[str] = Counter()
        """Failed attempts by reason."""
        self.num_failed = 0
        """Calls that failed `max_attempts` times."""
        self._options, self._first_delay_s = options or {}, first_delay_s
        self._closed = False

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> float | None:
        """The reward of one completion; None rejects it."""
        row = {**self._options, **row}
        delay_s = self._first_delay_s
        for attempt in range(self.max_attempts):
            if self._closed:
                raise MegarlError(f"reward {self.name}: called after its end")
            try:
                return await self._attempt(prompt, completion, prompt_ids, completion_ids, **row)
            except CallFailed as error:
                self._count(error)
                if error.is_final:
                    break
            if delay_s and attempt + 1 < self.max_attempts:
                await asyncio.sleep(delay_s)
                delay_s *= 2
        self.num_failed += 1
        return 0.0 if self.on_failure == "zero" else None

    @abstractmethod
    async def _attempt(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> float | None:
        """One try. CallFailed if it gave no finite number."""

    def _count(self, error: CallFailed) -> None:
        reason = str(error).partition(":")[0]
        self.failures[reason] += 1
        if self.failures[reason] == 1:
            logger.warning("reward %s: %s (later ones are only counted)", self.name, error)

    def export_stats(self) -> dict[str, float]:
        """Counts since the start: calls that failed, failed attempts by reason."""
        failures = {f"reward/attempts_failed/{name}": n for name, n in dict(self.failures).items()}
        counts = {"reward/failed": self.num_failed} | failures
        return {name: float(value) for name, value in counts.items()}

    async def close(self) -> None:
        """No call may be running or come after it."""
        self._closed = True


def finite(value: Any) -> float:
    """`value` as a number. CallFailed if it is none, or none that can be trained on."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CallFailed(f"error: {error}") from error
    if not math.isfinite(number):
        raise CallFailed(f"error: a reward of {number}")
    return number


class AsyncReward(Reward):
    """Awaits `function`, `max_concurrent` calls at one time.

    Args:
      timeout_s: one call, without its wait for a place.
      options: see Reward.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[float | None]],
        *,
        timeout_s: float,
        max_concurrent: int,
        **options: Any,
    ) -> None:
        super().__init__(getattr(function, "__name__", type(function).__name__), **options)
        self.function, self.timeout_s = function, timeout_s
        self.takes_messages = getattr(function, "takes_messages", False)
        self._slots = Slots(max_concurrent)

    async def _attempt(self, *args: Any, **row: Any) -> float | None:
        async with self._slots():
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    value = await self.function(*args, **row)
            except Exception as error:  # the user's code: it is counted
                if limit.expired():
                    raise CallFailed(f"timeout: no answer within {self.timeout_s} s") from error
                raise CallFailed(f"error: {error!r}") from error
        return None if value is None else finite(value)


class ThreadReward(Reward):
    """Calls `function` in threads of its own, `max_concurrent` at one time.

    A thread cannot be ended: one that is late is left behind, its call is not tried again, and
    another takes its place. The interpreter's end does not wait for them.

    Args:
      timeout_s: one call, from its start; the wait for a place is not counted.
      options: see Reward.

    Raises:
      MegarlError: MAX_LEFT_THREADS that were left behind still run: the function hangs.
    """

    def __init__(
        self,
        function: Callable[..., float],
        *,
        timeout_s: float,
        max_concurrent: int,
        **options: Any,
    ) -> None:
        super().__init__(getattr(function, "__name__", type(function).__name__), **options)
        self.function, self.timeout_s = function, timeout_s
        self._slots = Slots(max_concurrent)
        self._left: list[threading.Thread] = []

    async def _attempt(self, *args: Any, **row: Any) -> float:
        place = self._slots()
        await place.acquire()
        try:
            call = self._start(args, row)
        except BaseException:
            place.release()
            raise
        # The call's, not the caller's: one that goes leaves a thread that runs.
        call.add_done_callback(lambda _: place.release())
        return finite(await asyncio.shield(call))

    def _start(self, args: tuple[Any, ...], row: dict[str, Any]) -> "asyncio.Future[Any]":
        """The end of the call; CallFailed if it is late or raises."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT_THREADS:
            raise MegarlError(
                f"reward {self.name}: {len(self._left)} calls are over {self.timeout_s} s late and "
                "still run in threads, which cannot be ended; put the function into a module and "
                "name it by 'package.module:function', then it runs in processes, which can"
            )
        loop = asyncio.get_running_loop()
        call: asyncio.Future[Any] = loop.create_future()

        def end(value: Any, error: BaseException | None) -> None:
            limit.cancel()
            if call.done():
                return  # it was late
            if error is None:
                call.set_result(value)
            else:
                call.set_exception(CallFailed(f"error: {error!r}"))

        def leave() -> None:
            self._left.append(thread)
            text = f"timeout: no answer within {self.timeout_s} s, its thread is left behind"
            call.set_exception(CallFailed(text, is_final=True))

        def run() -> None:
            value, raised = None, None
            try:
                value = self.function(*args, **row)
            except BaseException as error:  # noqa: BLE001 - the user's code: it is counted
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, value, raised)

        thread = threading.Thread(target=run, name=f"reward {self.name}", daemon=True)
        thread.start()
        limit = loop.call_later(self.timeout_s, leave)
        return call


class RewardPool(Reward):
    """Calls `fn` in `num_workers` processes. They have this one's environment without
    megarl.config.rewards.KEY_VARIABLES.

    Args:
      fn: import string `package.module:function`.
      timeout_s: one call, without the start of its process.
      memory_bytes: address space of one process; 0 is no limit.
      options: see Reward.
    """

    def __init__(
        self,
        fn: str,
        *,
        timeout_s: float,
        num_workers: int,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(fn, **options)
        self.timeout_s = timeout_s
        self._idle: asyncio.Queue[_Worker] | None = None
        self._workers = [_Worker(fn, memory_bytes) for _ in range(num_workers)]

    async def _attempt(self, *args: Any, **row: Any) -> float:
        if self._idle is None:
            self._idle = asyncio.Queue()
            for worker in self._workers:
                self._idle.put_nowait(worker)
        worker = await self._idle.get()
        try:
            return finite(await worker.call({"args": args, "kwargs": row}, self.timeout_s))
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all processes. No call may be running or come after it."""
        await super().close()
        for worker in self._workers:
            await worker.kill()


class _Worker:
    """One process, started at its first call and again after it was killed."""

    def __init__(self, fn: str, memory_bytes: int) -> None:
        self._fn, self._memory_bytes = fn, memory_bytes
        self._process: asyncio.subprocess.Process | None = None

    async def call(self, message: dict[str, Any], timeout_s: float) -> float:
        waiting_for, limit_s = "its import", _START_TIMEOUT_S
        try:
            if self._process is None:
                async with asyncio.timeout(limit_s):
                    await self._start()
            waiting_for, limit_s = "an answer", timeout_s
            async with asyncio.timeout(limit_s):
                answer = await self._exchange(message)
        except TimeoutError as error:
            await self.kill()
            raise CallFailed(f"timeout: {waiting_for} took over {limit_s} s, killed") from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code = await self.kill()
            raise CallFailed(f"crash: the process ended with code {code}") from error
        except asyncio.CancelledError:
            await self.kill()  # its answer would be taken for that of the next call
            raise
        if "error" in answer:
            raise CallFailed(f"error: {answer['error']}")
        return float(answer["value"])

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megarl.rollout.reward_worker",
            self._fn,
            str(self._memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k not in KEY_VARIABLES},
            start_new_session=True,
        )
        await self._read()  # ready: the function is imported

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(encode_message(message))
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        header = await self._process.stdout.readexactly(HEADER.size)
        body = await self._process.stdout.readexactly(HEADER.unpack(header)[0])
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def kill(self) -> int | None:
        """End the process and what it started. Its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        # Its group, whatever asyncio knows of the process yet: what it started may live on, and
        # one that just ended is reaped by a thread before its return code is set.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()
