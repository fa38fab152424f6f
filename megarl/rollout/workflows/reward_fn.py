"""What a workflow takes for a reward function, as the one thing it awaits.

A script names its reward by the function itself. A function that another process can import
is called in a RewardPool, whose processes can be killed; one that it cannot (of the script,
a closure, a method) is called in a thread, which can only be left behind.
"""

import asyncio
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from megarl.config.schema import GenerationHyperparameters, RewardConfig
from megarl.rollout.rewards import RewardPool
from megarl.rollout.workflows.rlvr import RewardFn
from megarl.rollout.workflows.rlvr import RLVRWorkflow as _RLVRWorkflow

logger = logging.getLogger(__name__)

AnyRewardFn = RewardFn | Callable[..., float] | str
"""A RewardFn, a plain function of the same arguments, or `package.module:function`."""


def as_reward_fn(function: AnyRewardFn, limits: RewardConfig | None = None) -> RewardFn:
    """`function` as something to await.

    Args:
      limits: time, attempts and processes; None is the defaults. `fn` is not read.
    """
    if not isinstance(function, str) and _is_async(function):
        return cast(RewardFn, function)
    limits = limits or RewardConfig()
    target = function if isinstance(function, str) else _import_string(function)
    if target is not None:
        return _PoolOfTheLoop(target, limits)
    return _in_thread(cast(Callable[..., float], function), limits)


def _is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of the class, not whether it has one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _import_string(function: Any) -> str | None:
    """`module:name` of a module's own function; None of anything else."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module in (None, "__main__"):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return f"{module}:{name}" if found is function else None


class _PoolOfTheLoop:
    """A RewardPool that ends with the loop it is used in, and begins anew in another one."""

    def __init__(self, target: str, limits: RewardConfig) -> None:
        self._target, self._limits = target, limits
        self._loop: asyncio.AbstractEventLoop | None = None
        # Its processes find what this one finds beside its script.
        folder = str(Path(sys.argv[0]).resolve().parent)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])

    async def __call__(self, *args: Any, **row: Any) -> float | None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._pool = RewardPool(
                self._target,
                timeout_s=self._limits.timeout_s,
                max_attempts=self._limits.max_attempts,
                num_workers=self._limits.num_workers,
                on_failure=self._limits.on_failure,
            )
            self._end = asyncio.create_task(self._close_at_the_end(self._pool), name="rewards")
        return await self._pool(*args, **row)

    @staticmethod
    async def _close_at_the_end(pool: RewardPool) -> None:
        """A loop that ends cancels its tasks and waits for them."""
        try:
            await asyncio.Event().wait()
        finally:
            await pool.close()


def _in_thread(function: Callable[..., float], limits: RewardConfig) -> RewardFn:
    """Late or failing calls are worth what the limits say; a late one keeps its thread."""
    failed = 0.0 if limits.on_failure == "zero" else None
    is_warned = False

    async def call(*args: Any, **row: Any) -> float | None:
        nonlocal is_warned
        try:
            async with asyncio.timeout(limits.timeout_s):
                return float(await asyncio.to_thread(function, *args, **row))
        except Exception as error:  # noqa: BLE001 - the user's code: it is worth `failed`
            if not is_warned:
                logger.warning("reward %r failed (later ones are not told): %r", function, error)
            is_warned = True
            return failed

    return call


class RLVRWorkflow(_RLVRWorkflow):
    """megarl.rollout.workflows.rlvr.RLVRWorkflow with any of the forms of `as_reward_fn`."""

    def __init__(
        self,
        reward_fn: AnyRewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        **options: Any,
    ) -> None:
        super().__init__(as_reward_fn(reward_fn), gconfig, tokenizer, **options)
