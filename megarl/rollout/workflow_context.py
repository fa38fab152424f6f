"""What an episode can ask about itself: is it an evaluation, and which task is it."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkflowContext:
    is_eval: bool = False
    task_id: int | None = None

    def stat_scope(self) -> str:
        return "eval-rollout" if self.is_eval else "rollout"


_CURRENT: ContextVar[WorkflowContext] = ContextVar("workflow_context")


def get() -> WorkflowContext:
    """The context of the running episode; outside of one, that of training."""
    return _CURRENT.get(WorkflowContext())


def set_for_task(context: WorkflowContext) -> None:
    """Valid in the running asyncio task and those it starts."""
    _CURRENT.set(context)
