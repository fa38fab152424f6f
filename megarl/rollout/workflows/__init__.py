"""Workflows that ship with megarl, and how a config names any other."""

import importlib
from typing import Any

from megarl.rollout.api import RolloutWorkflow


def load_workflow(target: str, **arguments: Any) -> RolloutWorkflow:
    """An instance of `package.module:Class`.

    Raises:
      ValueError: what is named is not a RolloutWorkflow class.
    """
    module, _, name = target.partition(":")
    workflow_class = getattr(importlib.import_module(module), name)
    if not (isinstance(workflow_class, type) and issubclass(workflow_class, RolloutWorkflow)):
        raise ValueError(f"{target} is not a subclass of RolloutWorkflow")
    return workflow_class(**arguments)
