"""Rewards in processes of their own, so that no reward can hang or kill a run.

A call that is late loses its process (SIGKILL to its group) and is tried again in a new one; a
call that fails `max_attempts` times is worth 0 or rejects the episode, and is counted by
reason. Belongs to one event loop.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import Counter
from typing import Any, Literal

from megarl.errors import MegarlError
from megarl.rollout.reward_worker import HEADER, encode_message

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 8 << 30
_START_TIMEOUT_S = 120.0
"""A new process may take so long to import the function's module."""


class _CallFailed(MegarlError):
    """One attempt at one call; the text begins with a reason that is counted."""


class RewardPool:
    """Calls `fn` in `num_workers` processes. Awaitable like an async reward function.

    Args:
      fn: import string `package.module:function`.
      timeout_s: one call, without the start of its process.
      on_failure: what a call is worth that failed `max_attempts` times: "zero" is 0.0,
        "reject" is None.
      memory_bytes: address space of one process; 0 is no limit.
    """

    def __init__(
        self,
        fn: str,
        *,
        timeout_s: float,
        max_attempts: int,
        num_workers: int,
        on_failure: Literal["zero", "reject"],
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self.fn, self.timeout_s, self.max_attempts = fn, timeout_s, max_attempts
        self.on_failure = on_failure
        self.failures: Counter[str] = Counter()
        """Failed attempts by reason: timeout, crash, error."""
        self._closed = False
        self._idle: asyncio.Queue[_Worker] | None = None
        self._workers = [_Worker(fn, memory_bytes) for _ in range(num_workers)]

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> float | None:
        """The reward of one completion; None rejects it."""
        if self._idle is None:
            self._idle = asyncio.Queue()
            for worker in self._workers:
                self._idle.put_nowait(worker)
        message = {"args": [prompt, completion, prompt_ids, completion_ids], "kwargs": row}
        for _ in range(self.max_attempts):
            if self._closed:
                raise MegarlError(f"reward {self.fn}: called after its processes were ended")
            worker = await self._idle.get()
            try:
                return await worker.call(message, self.timeout_s)
            except _CallFailed as error:
                self._count(error)
            finally:
                self._idle.put_nowait(worker)
        return 0.0 if self.on_failure == "zero" else None

    def _count(self, error: _CallFailed) -> None:
        reason = str(error).partition(":")[0]
        self.failures[reason] += 1
        if self.failures[reason] == 1:
            logger.warning("reward %s: %s (later ones are only counted)", self.fn, error)

    async def close(self) -> None:
        """End all processes. No call may be running or come after it."""
        self._closed = True
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
            raise _CallFailed(f"timeout: {waiting_for} took over {limit_s} s, killed") from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code = await self.kill()
            raise _CallFailed(f"crash: the process ended with code {code}") from error
        except asyncio.CancelledError:
            await self.kill()  # its answer would be taken for that of the next call
            raise
        if "error" in answer:
            raise _CallFailed(f"error: {answer['error']}")
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
