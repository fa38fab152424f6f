"""What is told of an episode that has ended: a file of its samples, a span on the time line."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rollout.api import AcceptFn, RolloutWorkflow, Row
from megarl.rollout.workflow_context import WorkflowContext
from megarl.stats import trace
from megarl.trajectory import Trajectory, sequence_lengths


@dataclass(frozen=True)
class Task:
    """One episode to run."""

    task_id: int
    data: Row
    workflow: RolloutWorkflow
    should_accept: AcceptFn | None = None
    is_eval: bool = False


def trace_episode(task: Task, trajectory: Trajectory | None, started_s: float) -> None:
    """An episode on the run's time line."""
    what: dict[str, Any] = {"task_id": task.task_id, "accepted": trajectory is not None}
    if trajectory is not None:
        versions = trajectory["versions"][trajectory["loss_mask"].bool()]
        what["rewards"] = trajectory["rewards"].tolist()
        what["response_tokens"] = trajectory["loss_mask"].sum(1).tolist()
        what["versions"] = sorted(set(versions.tolist()))
    track = trace.EVAL_EPISODES if task.is_eval else trace.EPISODES
    trace.span("episode", track, started_s, time.monotonic(), **what)


def dump_episode(folder: Path, task: Task, trajectory: Trajectory) -> None:
    """FOLDER/[rollout|eval-rollout]/VERSION/TASK.jsonl, a line a sample.

    `token_ids`, `logprobs`, `versions` and `loss_mask` have a place for each of `seqlen` tokens;
    logprobs are rounded to 1e-6 nats, what is not finite is null.
    """
    scope = WorkflowContext(task.is_eval, task.task_id).stat_scope()
    versions = trajectory["versions"]
    head = int(versions.max())
    path = folder / scope / str(head) / f"{task.task_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = getattr(task.workflow, "tokenizer", None)
    decode: Callable[[list[int]], str] = tokenizer.decode if tokenizer else str
    lines = []
    for i, length in enumerate(sequence_lengths(trajectory).tolist()):
        ids = trajectory["input_ids"][i, :length].tolist()
        generated = trajectory["loss_mask"][i, :length].bool()
        prompt_len = int(generated.int().argmax()) if generated.any() else length
        seen = versions[i, :length][generated]
        record = {
            "task_id": task.task_id,
            "sample_idx": i,
            "seqlen": length,
            "prompt_len": prompt_len,
            "head_version": int(seen.max()) if seen.numel() else -1,
            "tail_version": int(seen.min()) if seen.numel() else -1,
            "reward": trajectory["rewards"][i].item(),
            "prompt": decode(ids[:prompt_len]),
            "completion": decode(ids[prompt_len:]),
            "token_ids": ids,
            "logprobs": [
                round(x, 6) if math.isfinite(x) else None
                for x in trajectory["logprobs"][i, :length].tolist()
            ],
            "versions": versions[i, :length].tolist(),
            "loss_mask": trajectory["loss_mask"][i, :length].tolist(),
        }
        lines.append(json.dumps(record))
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)
