"""Imports may only point down. Adding a layer or an arrow is a change to these tables."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megarl
import megarl.launch

LAYERS = [  # low to high; a module imports its own layer and those on earlier lines only
    {"errors"},
    {"config", "parallel", "platform", "trajectory", "stats"},
    {"data", "algorithms", "rollout"},
    {"ops"},  # algorithms say what is computed, ops compute it fast
    {"model", "bridge"},
    {"rollout_head"},
    {"actor"},
    {"train", "sft", "evaluate", "convert", "verify", "plan"},
    {"api", "cli", "launch"},
]
SIBLINGS = {"data", "algorithms", "rollout"}  # of one layer, but strangers to each other
NEVER = {
    "errors": {"torch"},
    "config": {"torch"},
    "launch": {"torch"},
    "cli": {"torch"},
    "algorithms": {"megatron", "transformers"},
    "ops": {"megatron"},
    "data": {"megatron"},
    "rollout": {"megatron"},
    "stats": {"megatron"},
}
ENGINES = {"vllm", "sglang"}  # imported inside their own servers only, from here:
IN_ENGINES = "bridge/engines"
ENGINES_MAY_USE = ("megarl.errors",)  # and of the bridge:
ENGINES_MAY_USE += tuple(
    f"megarl.bridge.{x}"
    for x in ("boxes", "group", "needs", "partial", "plan", "rounds", "transport", "wire")
)
ENGINES_MAY_USE += ("megarl.ops.pack",)  # torch alone where there are no kernels
PARALLEL_STATE = "megatron.core.parallel_state"  # called by parallel.py only

ROOT = Path(megarl.__file__).parent
LAUNCH = Path(megarl.launch.__file__).parent
MODULES = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
MODULES |= {f"launch/{path.name}": path for path in LAUNCH.glob("*.py")}


def imported(path: Path) -> set[str]:
    """Dotted names of all imports of a file, wherever they stand in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from a import b` may import the module a.b.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def wrong_imports(module: str, path: Path) -> list[str]:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    unit = Path(module).parts[0].removesuffix(".py")
    if unit == "__init__":
        return [f"{module} imports {name}" for name in imported(path) - {"warnings"}]
    assert unit in level, f"{unit} has no place in LAYERS"
    wrong = []
    for name in imported(path):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0] if top == "megarl" else None
        in_engines = module.startswith(IN_ENGINES)
        if target is None:
            bad = (
                top in NEVER.get(unit, ())
                or (top in ENGINES and not in_engines)
                or (name.startswith(PARALLEL_STATE) and unit != "parallel")
            )
        elif target not in level:
            bad = target != "__version__"
        else:
            stranger = target != unit and {target, unit} <= SIBLINGS
            bad = level[target] > level[unit] or stranger
            bad |= in_engines and not name.startswith((*ENGINES_MAY_USE, "megarl.bridge.engines"))
        if bad:
            wrong.append(f"{module} imports {name}")
    return wrong


def test_imports_point_down():
    wrong = [line for module, path in MODULES.items() for line in wrong_imports(module, path)]
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config/x.py", "import torch"),
        ("config/x.py", "from megarl.data import packing"),
        ("data/x.py", "def f():\n    import megarl.ops.logprob"),
        ("rollout/x.py", "from megatron.core import tensor_parallel"),
        ("actor/x.py", "from megatron.core import parallel_state"),
        ("bridge/sender.py", "import vllm"),
        ("bridge/engines/x.py", "from megarl.rollout import client"),
        ("launch/x.py", "import torch.distributed"),
        ("train.py", "from megarl import launch"),
        ("train.py", "from megarl import nothing_of_ours"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path, module, source):
    path = tmp_path / "x.py"
    path.write_text(source)
    assert len(wrong_imports(module, path)) == 1


@pytest.mark.parametrize(
    "module",
    ["megarl.errors", "megarl.config.load", "megarl.config.checks", "megarl.stats.sinks"],
)
def test_imports_no_torch(module):
    """What the tables cannot see: a package of ours or of others that brings torch along."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
