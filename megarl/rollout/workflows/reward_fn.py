"""What a workflow takes for a reward function, as the one thing it awaits.

A script names its reward by the function itself. A function that another process can import
is called in a RewardPool, whose processes can be killed; one that it cannot (of the script,
a closure, a method) is called in a thread, which can only be left behind. What is `async` is
awaited. All have the same limits, and count the calls that fail. A config names its reward by an
import string, or the URL of a reward model.
"""

import asyncio
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.schema import GenerationHyperparameters, RewardConfig
from megarl.rollout.reward_model import RewardModel
from megarl.rollout.reward_worker import load_function
from megarl.rollout.rewards import AsyncReward, Reward, RewardPool, ThreadReward
from megarl.rollout.workflows.rlvr import RewardFn
from megarl.rollout.workflows.rlvr import RLVRWorkflow as _RLVRWorkflow

AnyRewardFn = RewardFn | Callable[..., float] | str | RewardConfig
"""A RewardFn, a plain function of the same arguments, `package.module:function`, or what the
`reward` section of a config names."""


def make_reward(config: RewardConfig) -> Reward:
    """The reward that a config names; its module is imported. For one event loop.

    Raises:
      ConfigError: see RewardModel.
    """
    if config.url is not None:
        return RewardModel(config)
    if _is_async(function := load_function(config.fn)):
        return _in_this_process(AsyncReward, function, config)
    return RewardPool(
        config.fn,
        timeout_s=config.timeout_s,
        max_attempts=config.max_attempts,
        num_workers=config.num_workers,
        on_failure=config.on_failure,
        options=config.options,
    )


def as_reward_fn(function: AnyRewardFn, limits: RewardConfig | None = None) -> RewardFn:
    """`function` as something to await; `export_stats` of it are its counts, see Reward.

    Args:
      limits: time, attempts, processes or calls at one time (`max_concurrent`, also of threads;
        None: one for each CPU) and options; `fn` and `url` are not read. None is the defaults.
        Not for a Reward, which has its own, nor for a RewardConfig.
    """
    if isinstance(function, Reward | _RewardOfTheLoop):
        return function
    if isinstance(function, RewardConfig):
        return _RewardOfTheLoop(function)
    limits = limits or RewardConfig()
    if not isinstance(function, str) and _is_async(function):
        return _in_this_process(AsyncReward, function, limits)
    target = function if isinstance(function, str) else _import_string(function)
    if target is not None:
        return _RewardOfTheLoop(replace(limits, fn=target))
    return _in_this_process(ThreadReward, function, limits)


def _in_this_process(
    kind: type[AsyncReward] | type[ThreadReward], function: Any, limits: RewardConfig
) -> Reward:
    return kind(
        function,
        timeout_s=limits.timeout_s,
        max_attempts=limits.max_attempts,
        max_concurrent=limits.max_concurrent or os.cpu_count() or 1,
        on_failure=limits.on_failure,
        options=limits.options,
    )


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


class _RewardOfTheLoop:
    """A reward that ends with the loop it is used in, and begins anew in another one."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.takes_messages = config.url is not None  # see Reward
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reward: Reward | None = None
        self._counts: Counter[str] = Counter()  # of the loops before
        # Its processes find what this one finds beside its script.
        folder = str(Path(sys.argv[0]).resolve().parent)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])

    async def __call__(self, *args: Any, **row: Any) -> float | None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._counts = Counter(self.export_stats())
            self._loop, self._reward = loop, make_reward(self._config)
            self._end = asyncio.create_task(self._close_at_the_end(self._reward), name="rewards")
        assert self._reward is not None
        return await self._reward(*args, **row)

    def export_stats(self) -> dict[str, float]:
        """See Reward; over all loops."""
        counts = self._counts.copy()
        if self._reward is not None:
            counts.update(self._reward.export_stats())
        return dict(counts)

    @staticmethod
    async def _close_at_the_end(reward: Reward) -> None:
        """A loop that ends cancels its tasks and waits for them."""
        try:
            await asyncio.Event().wait()
        finally:
            await reward.close()


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

    def export_stats(self) -> dict[str, float]:
        """The reward's counts, of a run whose script made this workflow."""
        stats: dict[str, float] = getattr(self.reward_fn, "export_stats", dict)()
        return stats
