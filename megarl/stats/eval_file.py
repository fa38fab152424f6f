"""An evaluation as a file, with every prompt's rewards, and as a table for people.

    {"checkpoint": FOLDER or null, "version": N or null, "dataset": {...}, "n_samples": n,
     "success_threshold": x, "metrics": {"eval/reward": ...},
     "prompts": [{"row_id": 0, "rewards": [1.0, 0.0], "response_tokens": [5, 9],
                  "no_eos": [false, false]}, ...]}

Two files of one dataset can be compared prompt by prompt. Imports no torch.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.config.run import DatasetConfig
from megarl.errors import ConfigError
from megarl.stats.evaluation import Estimate, Evaluation, PromptScores, mean_name


def dataset_identity(config: DatasetConfig) -> dict[str, Any]:
    """What must be equal for a row_id to name the same prompt."""
    return {
        "path": config.path,
        "split": config.split,
        "seed": config.seed,
        "options": config.options,
    }


def write_evaluation(
    path: Path,
    evaluation: Evaluation,
    *,
    dataset: DatasetConfig,
    checkpoint: Path | None = None,
    version: int | None = None,
) -> None:
    """A reader finds the old file or the new one, never a part."""
    metrics = {
        key: value if math.isfinite(value) else None for key, value in evaluation.metrics().items()
    }
    record = {
        "checkpoint": None if checkpoint is None else str(checkpoint.resolve()),
        "version": version,
        "dataset": dataset_identity(dataset),
        "n_samples": evaluation.n_samples,
        "success_threshold": evaluation.success_threshold,
        "metrics": metrics,
        "prompts": [asdict(prompt) for prompt in evaluation.prompts],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
    partial.rename(path)


def read_evaluation(path: Path, dataset: DatasetConfig) -> Evaluation:
    """What `write_evaluation` wrote.

    Raises:
      ConfigError: no such file, or one of something else or of another dataset.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        evaluation = Evaluation(
            prompts=[PromptScores(**prompt) for prompt in record["prompts"]],
            n_samples=record["n_samples"],
            success_threshold=record["success_threshold"],
        )
        other = record["dataset"]
    except OSError as error:
        raise ConfigError(f"--compare: {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--compare: {path} is no evaluation of megarl eval: {error!r}") from None
    own = dataset_identity(dataset)
    for key in own:
        if own[key] != other[key]:
            raise ConfigError(
                f"--compare: {path} has valid_dataset.{key} {other[key]!r}, this run {own[key]!r}"
            )
    return evaluation


def free_name(folder: Path, checkpoint: Path) -> Path:
    """FOLDER/NAME.json of a checkpoint; NAME-2, ... where NAME is another checkpoint's."""
    name = checkpoint.resolve().name
    for number in range(1, 10_000):
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        if not path.exists() or _checkpoint_of(path) == str(checkpoint.resolve()):
            return path
    raise ConfigError(f"RUN/eval: {folder} has ten thousand evaluations named {name}")


def _checkpoint_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("checkpoint")
    except (ValueError, AttributeError):
        return None  # a file of somebody else, which stays


def table(evaluation: Evaluation) -> str:
    """A line a number, with its 95% interval."""
    rows = [(mean_name(evaluation), evaluation.mean)]
    rows += [(f"pass@{k}", share) for k, share in evaluation.pass_at.items()]
    lines = [f"{'':<10}  {'value':>7}  95% interval"]
    lines += [_line(name, estimate, "") for name, estimate in rows]
    asked = evaluation.num_episodes + evaluation.num_failed
    lines += [
        f"{len(evaluation.prompts)} prompts, {asked} samples; a success has reward >= "
        f"{evaluation.success_threshold:g}; cut by length: {evaluation.no_eos_ratio:.1%}",
    ]
    if evaluation.num_failed:
        lines.append(failed_line(evaluation))
    if not evaluation.pass_at:
        lines.append("no pass@k: a prompt has more rows than samples")
    return "\n".join(lines)


def failed_line(evaluation: Evaluation) -> str:
    """What is to be said of samples without a score."""
    asked = evaluation.num_episodes + evaluation.num_failed
    return (
        f"{evaluation.num_failed} of {asked} samples have no score: they count as reward 0 and "
        f"as no success"
    )


def comparison_table(num_pairs: int, differences: dict[str, Estimate], other: str) -> str:
    lines = [f"difference to {other}, paired over {num_pairs} prompts:"]
    lines += [_line(name, estimate, "+") for name, estimate in differences.items()]
    return "\n".join(lines)


def _line(name: str, estimate: Estimate, sign: str) -> str:
    bounds = f"[{estimate.low:{sign}.4f}, {estimate.high:{sign}.4f}]"
    return f"{name:<10}  {estimate.value:{sign}7.4f}  {bounds}"
