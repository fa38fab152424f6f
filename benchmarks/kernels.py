"""Times and checks the kernels of csrc/ on this machine's GPU, or on its CPU.

    python benchmarks/kernels.py [--json FILE] [--quick] [--device cpu|cuda] [--only SECTION ...]
    python benchmarks/kernels.py --floors GBS      bytes over bandwidth, without a GPU

On a GPU it first builds _cuda.so for that GPU and runs compute-sanitizer, if there is one. Every
op is compared with float64, or bit by bit with torch, in the same run before it is timed. One that
is wrong is exit code 1 and no number. `--quick` is for small sizes: it shows that this file
works, its times mean nothing.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import floors
import peers
import torch
from timing import ROOT, Bench, CheckFailed, Row, environment, write_json

_SECONDS = 420
"""After these no further comparison is begun."""

_SANITIZER_SECONDS = 100
"""A tool at most; under it the kernels of torch run a hundred times slower too."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", choices=list(sections()), default=list(sections()))
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--floors", type=float, metavar="GBS")
    arguments = parser.parse_args()
    if arguments.floors is not None:
        print(floors.table(arguments.floors, arguments.floors))
        return 0
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = environment(device)
    bench = Bench(device, arguments.quick, arguments.seconds)
    try:
        if device.type == "cuda":
            build_cuda()
            found["sanitizer"] = {} if arguments.no_sanitizer else sanitize()
        # Not before the build: it loads the libraries. Where megarl is not installed, from here.
        sys.path.append(str(ROOT))
        from megarl.ops import library

        if library.sources()[device.type] != "kernel":
            raise CheckFailed(f"no kernels for {device.type}: python -m megarl.ops.build")
        bench.measure_ceilings()
        for name in arguments.only:
            sections()[name](bench)
    except CheckFailed as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    found |= {
        "peers": peers.versions(),
        "load_after": os.getloadavg()[0],
        "read_gbs": bench.read_gbs,
        "copy_gbs": bench.copy_gbs,
        "seconds": round(time.monotonic() - bench.started),
        "is_quick": arguments.quick,
    }
    print(report(found, bench.rows))
    if device.type == "cuda" and bench.read_gbs and bench.copy_gbs:
        print("\n" + floors.table(bench.read_gbs, bench.copy_gbs))
    write_json(arguments.json, found, rows=[dataclasses.asdict(row) for row in bench.rows])
    return 0


def sections() -> dict[str, Callable[[Bench], None]]:
    """Name -> what measures it; imported when it is run, after the libraries were built."""

    def of(module: str) -> Callable[[Bench], None]:
        def run(bench: Bench) -> None:
            __import__(module)
            sys.modules[module].run(bench)

        return run

    return {name: of(name) for name in ("logprob", "loss", "linear", "tokens", "pack")}


def build_cuda() -> None:
    """Build _cuda.so for this GPU alone.

    Raises:
      CheckFailed: it does not build.
    """
    major, minor = torch.cuda.get_device_capability()
    suffix = "a" if major >= 9 else ""
    wanted = {"MEGARL_CUDA": "1", "MEGARL_CUDA_ARCHS": f"{major}{minor}{suffix}"}
    built = subprocess.run(
        [sys.executable, "-m", "megarl.ops.build"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **wanted},
        check=False,
    )
    print(built.stdout, end="", flush=True)
    if built.returncode:
        raise CheckFailed(f"python -m megarl.ops.build\n{built.stdout}{built.stderr}")


def sanitize() -> dict[str, str]:
    """What compute-sanitizer says of sanitized.py, by tool.

    Raises:
      CheckFailed: it has found something.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"compute-sanitizer": "not on PATH: not run"}
    said = {}
    # Buffers of their own, so that memcheck sees where each ends.
    own_buffers = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "3", sys.executable]
        command += [str(Path(__file__).parent / "sanitized.py")]
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=ROOT,
                env={**os.environ, **own_buffers},
                timeout=_SANITIZER_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            said[tool] = f"not finished in {_SANITIZER_SECONDS} s"
            continue
        lines = (result.stdout + result.stderr).strip().splitlines()
        if result.returncode:
            raise CheckFailed(f"compute-sanitizer --tool {tool}\n" + "\n".join(lines[-40:]))
        said[tool] = lines[-1]
    return said


def report(found: dict[str, object], rows: list[Row]) -> str:
    """The environment, then a table a section and shape. Every number in it was measured."""
    lines = [f"{key}: {value}" for key, value in found.items()]
    title = None
    for row in rows:
        if (row.section, row.shape) != title:
            title = (row.section, row.shape)
            lines += ["", f"{row.section}  {row.shape}"]
            lines.append(
                f"  {'':<34}{'ms':>10}{'p10':>10}{'p90':>10}{'GB/s':>8}{'TF/s':>7}{'ceiling':>10}"
                f"{'x peer':>8}{'memory':>9}{'error':>10}"
            )
        lines.append(_line(row))
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.stats is None:
        return f"  {row.name:<34}{row.note}"
    ms = row.stats.median
    cells = [f"{ms:>10.3f}{row.stats.p10:>10.3f}{row.stats.p90:>10.3f}"]
    cells.append(f"{1e3 * row.gigabytes / ms:>8.1f}" if row.gigabytes else f"{'':>8}")
    cells.append(f"{1e3 * row.teraflop / ms:>7.1f}" if row.teraflop else f"{'':>7}")
    cells.append(f"{row.floor_ms / ms:>10.1%}" if row.floor_ms is not None else f"{'':>10}")
    cells.append(f"{row.speedup:>8.2f}" if row.speedup is not None else f"{'':>8}")
    cells.append(f"{row.peak_share:>9.2%}" if row.peak_share is not None else f"{'':>9}")
    cells.append(f"{row.error:>10.1e}" if row.error is not None else f"{'':>10}")
    return f"  {row.name:<34}{''.join(cells)}{'  ' + row.note if row.note else ''}"


if __name__ == "__main__":
    sys.exit(main())
