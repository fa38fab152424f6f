"""`megarl verify`: runs `megarl.verify` in the layout of a run and shows what it found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.checks import check, has_weights
from megarl.config.run import GRPOConfig
from megarl.errors import ConfigError
from megarl.launch import local

REPORT = "verify.json"


def verify(
    config: GRPOConfig, *, checkpoint: Path | None, with_servers: bool, as_json: bool
) -> int:
    """Print the table; 0 if every number is within its bound, 1 if one is not.

    Args:
      config: resolved.
      checkpoint: HF folder or training state to be compared with `actor.path`; None compares
        that with itself as transformers reads it.
    """
    reference = Path(config.actor.path)
    arguments = ["--reference", str(reference.resolve())]
    if checkpoint is not None and has_weights(checkpoint):
        tokenizer_path = config.tokenizer_path or str(reference)
        config = replace(
            config,
            actor=replace(config.actor, path=str(checkpoint)),
            tokenizer_path=tokenizer_path,
        )
    elif checkpoint is not None:
        if not (checkpoint / "metadata.json").is_file() and not (checkpoint / "latest").is_file():
            raise ConfigError(
                f"--checkpoint: {checkpoint} holds neither *.safetensors nor a training state"
            )
        arguments += ["--state", str(checkpoint.resolve())]
    actor = replace(config.actor, init_from_scratch=False)
    config = replace(config, actor=actor)
    check(config)
    report_path = config.run_dir / "verify" / REPORT
    report_path.unlink(missing_ok=True)
    code: int = local.run(config, "verify", arguments=arguments, with_servers=with_servers)
    if code:
        return code
    report = json.loads(report_path.read_text(encoding="utf-8"))
    print(json.dumps(report, indent=2) if as_json else table(report))
    return 0 if all(row["ok"] for row in report["checks"]) else 1


def table(report: dict[str, Any]) -> str:
    """The report for people, a line a check."""
    rows = [("check", "measured", "bound", "", "")]
    for row in report["checks"]:
        measured = "none" if row["measured"] is None else f"{row['measured']:.3g}"
        numbers = (measured, f"{row['bound']:.3g}")
        rows.append((row["name"], *numbers, "ok" if row["ok"] else "WRONG", row["detail"]))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for name, measured, bound, verdict, detail in rows:
        line = f"{name:<{widths[0]}}  {measured:>{widths[1]}}  {bound:>{widths[2]}}"
        lines.append(f"{line}  {verdict:<{widths[3]}}  {detail}".rstrip())
    return "\n".join(lines)
