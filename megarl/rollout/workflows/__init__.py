"""Workflows that ship with megarl, and how scripts and configs name any other."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from megarl.errors import ConfigError
from megarl.rollout.api import AcceptFn, RolloutWorkflow
from megarl.rollout.workflows.group import GroupedWorkflow

WorkflowLike = Any
"""An instance, a class, or the class's `package.module:Class` or `package.module.Class`. A class
is any with `async def arun_episode(self, engine, data)`."""


def load_workflow(
    target: str, given: Mapping[str, Any], options: Mapping[str, Any]
) -> RolloutWorkflow:
    """What a config names, as an instance.

    Args:
      given: what a run has for its workflow. The class gets what it names of it, or all of it
        if it takes any keyword.
      options: `rollout.workflow_options`.

    Raises:
      ConfigError: it is no workflow, or its class refuses the options.
    """
    try:
        found = _load(target)
        return resolve_workflow(found, _arguments(found, given, options, target))
    except ValueError as error:
        raise ConfigError(f"rollout.workflow: {target}: {error}") from error


def _arguments(
    found: Any, given: Mapping[str, Any], options: Mapping[str, Any], target: str
) -> dict[str, Any]:
    if not isinstance(found, type):
        return dict(options)
    signature = inspect.signature(found)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = {name: x for name, x in given.items() if takes_any or name in signature.parameters}
    try:
        signature.bind(**named, **options)
    except TypeError as error:
        raise ConfigError(f"rollout.workflow_options: {target}: {error}") from error
    return {**named, **options}


def resolve_workflow(
    workflow: WorkflowLike, workflow_kwargs: Mapping[str, Any] | None = None, group_size: int = 1
) -> RolloutWorkflow:
    """An instance.

    Args:
      workflow_kwargs: arguments of the class.
      group_size: runs of each episode at the same time, see GroupedWorkflow.

    Raises:
      ValueError: it is no workflow, kwargs were given for an instance, or group_size < 1.
    """
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"group_size must be an int >= 1, got {group_size!r}")
    found = _load(workflow) if isinstance(workflow, str) else workflow
    if not inspect.iscoroutinefunction(getattr(found, "arun_episode", None)):
        is_agent = inspect.iscoroutinefunction(getattr(found, "run", None))
        hint = "; wrap it: AgentWorkflow(agent, gconfig, tokenizer)" if is_agent else ""
        raise ValueError(f"{workflow!r} has no `async def arun_episode(self, engine, data)`{hint}")
    if isinstance(found, type):
        instance = found(**workflow_kwargs or {})
    elif workflow_kwargs:
        raise ValueError(f"workflow_kwargs are for a class, {workflow!r} is an instance")
    else:
        instance = found
    return instance if group_size == 1 else GroupedWorkflow(instance, group_size)


def resolve_accept_fn(should_accept_fn: AcceptFn | str | None) -> AcceptFn | None:
    """A function of a trajectory, or the function's import string. ValueError for another thing."""
    found = _load(should_accept_fn) if isinstance(should_accept_fn, str) else should_accept_fn
    if found is not None and (not callable(found) or inspect.iscoroutinefunction(found)):
        raise ValueError(f"should_accept_fn must be a plain function, got {should_accept_fn!r}")
    return found


class ResolvedWorkflows:
    """`resolve_workflow` that makes one instance of what is asked for again.

    A script names class and arguments with every batch; an instance may have processes of its own.
    """

    def __init__(self) -> None:
        self._made: list[tuple[tuple[Any, dict[str, Any], int], RolloutWorkflow]] = []

    def __call__(
        self,
        workflow: WorkflowLike,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> RolloutWorkflow:
        """Arguments count as the same where they are equal."""
        if not isinstance(workflow, str | type):
            return resolve_workflow(workflow, workflow_kwargs, group_size)
        asked = (workflow, dict(workflow_kwargs or {}), group_size)
        for made_for, made in self._made:
            if made_for == asked:
                return made
        made = resolve_workflow(workflow, workflow_kwargs, group_size)
        self._made.append((asked, made))
        return made


def _load(target: str) -> Any:
    """`package.module:name` or `package.module.name`. ValueError if there is no such thing."""
    module, colon, name = target.partition(":")
    if not colon:
        module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{target!r} is not `package.module:name`: {error}") from error
