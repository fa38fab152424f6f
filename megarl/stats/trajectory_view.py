"""`megarl report RUN_DIR --trajectory TASK`: a dumped trajectory, token by token.

Each token with its logprob, the version that sampled it, and whether it is trained on: as lines
for a terminal, and as one HTML file that fetches nothing. What a model wrote is not trusted: it
is escaped in the HTML, whose policy forbids scripts as well, and shown without control characters
in the terminal. Imports torch only with the run's tokenizer.
"""

import html
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.load import load
from megarl.config.run import GRPOConfig
from megarl.errors import ConfigError

Sample = dict[str, Any]
"""A line of a dump, see megarl.rollout.executor."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 14px/1.7 monospace; max-width: 110ch; margin: 2em auto; padding: 0 1em; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; }}
.given {{ color: #777; }}
.unused {{ text-decoration: line-through; }}
.version {{ border-left: 3px solid #225; padding-left: 2px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Background: <span style="background:hsl(0 85% 80%)">a token that was unlikely</span> to
<span style="background:hsl(120 85% 80%)">one that was certain</span> when it was sampled. Grey:
given, not sampled. Struck out: sampled, not trained on. A bar: from here on another version
sampled. Hover for numbers.</p>
{body}
</body>
</html>
"""


class Found(NamedTuple):
    """What `--trajectory` names."""

    name: str
    """SCOPE/VERSION/TASK."""
    samples: list[Sample]


def find(run_dir: Path, what: str) -> Found:
    """The samples that `TASK[:SAMPLE]` or `SCOPE/VERSION/TASK[:SAMPLE]` names.

    Raises:
      ConfigError: nothing, or several, are of that name; or the dump has no tokens.
    """
    task, colon, sample = what.partition(":")
    scopes = {"rollout", "eval-rollout"}
    paths = [
        path
        for path in sorted(run_dir.glob("*rollout/*/*.jsonl"))
        if path.parent.parent.name in scopes and task in (path.stem, _name(run_dir, path))
    ]
    if not paths:
        raise ConfigError(
            f"--trajectory: no dump of task {task!r} under {run_dir}; "
            f"rollout.dump_to_file: true writes them"
        )
    if len(paths) > 1:
        names = ", ".join(_name(run_dir, path) for path in paths)
        raise ConfigError(
            f"--trajectory: task {task} is there {len(paths)} times, name one: {names}"
        )
    lines = paths[0].read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    if colon:
        samples = [x for x in samples if str(x["sample_idx"]) == sample]
    if not samples:
        raise ConfigError(f"--trajectory: {paths[0]} has {len(lines)} samples, none is {sample!r}")
    if any("token_ids" not in x for x in samples):
        raise ConfigError(f"--trajectory: {paths[0]} was written without token ids")
    return Found(_name(run_dir, paths[0]), samples)


def _name(run_dir: Path, path: Path) -> str:
    return path.relative_to(run_dir).with_suffix("").as_posix()


def token_texts(run_dir: Path, samples: list[Sample]) -> dict[int, str]:
    """The text of each token id, by the run's tokenizer. ConfigError if it is not there."""
    config = load(run_dir / "config.yaml", [], GRPOConfig)
    folder = config.tokenizer_path or config.actor.path
    # Not above: it brings torch along.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"tokenizer_path: {folder}: {reason}") from error
    ids = {token for sample in samples for token in sample["token_ids"]}
    return {token: str(tokenizer.decode([token])) for token in ids}


# ---------------------------------------------------------------- for a terminal


def as_text(found: Found, texts: dict[int, str]) -> str:
    """A line a token."""
    blocks = []
    for sample in found.samples:
        lines = [_heading(found, sample), "position       id  trained  version   logprob  token"]
        for i, token in enumerate(sample["token_ids"]):
            version = str(sample["versions"][i]) if _is_sampled(sample, i) else ""
            trained = "yes" if sample["loss_mask"][i] else ""
            lines.append(
                f"{i:>8}  {token:>7}  {trained:>7}  {version:>7}  "
                f"{_logprob(sample, i):>8}  {texts.get(token, '')!r}"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _heading(found: Found, sample: Sample) -> str:
    return (
        f"{found.name}:{sample['sample_idx']}  reward {sample['reward']:g}, {sample['seqlen']} "
        f"tokens of which {sample['prompt_len']} are the prompt, versions "
        f"{sample['tail_version']} to {sample['head_version']}"
    )


def _logprob(sample: Sample, i: int) -> str:
    """Nothing where the token was given; `?` where the dump has null."""
    if not _is_sampled(sample, i):
        return ""
    value = sample["logprobs"][i]
    return "?" if value is None else f"{value:.4f}"


def _is_sampled(sample: Sample, i: int) -> bool:
    return bool(sample["loss_mask"][i]) or sample["versions"][i] >= 0


# ---------------------------------------------------------------- for a browser


def as_html(found: Found, texts: dict[int, str]) -> str:
    """One page that fetches nothing."""
    sections = []
    for sample in found.samples:
        spans, before = [], None
        for i in range(len(sample["token_ids"])):
            version = sample["versions"][i] if _is_sampled(sample, i) else before
            spans.append(_span(sample, i, texts, is_new_version=before not in (None, version)))
            before = version
        heading = html.escape(_heading(found, sample))
        sections.append(f"<h2>{heading}</h2>\n<pre>{''.join(spans)}</pre>")
    return _PAGE.format(title=html.escape(found.name), body="\n".join(sections))


def _span(sample: Sample, i: int, texts: dict[int, str], *, is_new_version: bool) -> str:
    token, version = sample["token_ids"][i], sample["versions"][i]
    text = html.escape(texts.get(token, f"[{token}]"))
    classes, title, style = [], f"position {i}, id {token}", ""
    if _is_sampled(sample, i):
        logprob = sample["logprobs"][i]
        chance = 0.0 if logprob is None else math.exp(min(0.0, logprob))
        style = f' style="background:hsl({120 * chance:.0f} 85% 80%)"'
        title += f", logprob {_logprob(sample, i)}, version {version}"
        if not sample["loss_mask"][i]:
            classes.append("unused")
        if is_new_version:
            classes.append("version")
    else:
        classes.append("given")
    names = f' class="{" ".join(classes)}"' if classes else ""
    return f'<span{names}{style} title="{title}">{text}</span>'


def write(path: Path, page: str) -> None:
    """The page appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.rename(path)
