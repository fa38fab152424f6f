"""Times, memory and bandwidth of alternatives, taken in turns in one process.

On CUDA events are recorded on the stream after the level-2 cache was overwritten and while a
sleeping kernel lets the launches queue up, so that no launch from Python is timed. On a CPU it is
wall time, so what else the machine does is in it: the load is reported beside it.
"""

import gc
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
_FLUSH_BYTES = 512 << 20
"""Over any level-2 cache; B200 has 126 MB."""
_SLEEP_CYCLES = 1_000_000
"""Half a millisecond, in which Python queues a handful of launches."""


class CheckFailed(Exception):
    """An op is wrong: nothing is timed."""


@dataclass(frozen=True)
class Stats:
    """Milliseconds."""

    median: float
    p10: float
    p90: float
    samples: int


@dataclass(frozen=True)
class Variant:
    """One of the alternatives of a comparison."""

    name: str
    body: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Before each run of `body`, not timed."""
    measure: Callable[[object], float] | None = None
    """Result of `body` -> its largest difference from float64, or how many elements have not the
    bits that they must have; ours raise CheckFailed there."""
    is_ours: bool = False
    note: str = ""


@dataclass
class Row:
    """A line of the table, and of the JSON."""

    section: str
    shape: str
    name: str
    stats: Stats | None = None
    gigabytes: float = 0.0
    """What the operation must read and write at least."""
    floor_ms: float | None = None
    teraflop: float = 0.0
    peak_bytes: int | None = None
    peak_share: float | None = None
    """Of the largest input."""
    speedup: float | None = None
    """Of this row over the first peer of the comparison."""
    error: float | None = None
    note: str = ""


@dataclass
class Bench:
    """What a section measures with, and where its rows go."""

    device: torch.device
    is_quick: bool
    seconds: float
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    read_gbs: float | None = None
    copy_gbs: float | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def is_late(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def check(self, what: str, error: float, bound: float) -> float:
        """`error`, if it is within its bound.

        Raises:
          CheckFailed: it is not, or is nan.
        """
        if not error <= bound:
            raise CheckFailed(f"{what}: error {error:.3g}, bound {bound:.3g}")
        return error

    def skip(self, section: str, shape: str, name: str, note: str) -> None:
        self.rows.append(Row(section, shape, name, note=note))

    def compare(
        self,
        section: str,
        shape: str,
        variants: Sequence[Variant],
        *,
        gigabytes: float = 0.0,
        writes: bool = False,
        teraflop: float = 0.0,
        largest_bytes: int | None = None,
        rounds: int | None = None,
    ) -> None:
        """Time variants in turns, one of each a round; one row each.

        Args:
          gigabytes: read and written at least; against the copy ceiling if it `writes`.
          largest_bytes: of the tensor that memory is compared with; None measures no memory.
        """
        ceiling = self.copy_gbs if writes else self.read_gbs
        rows, alive = [], []
        for variant in variants:
            row = Row(section, shape, variant.name, gigabytes=gigabytes, teraflop=teraflop)
            row.note = variant.note
            row.floor_ms = 1e3 * gigabytes / ceiling if ceiling and gigabytes else None
            rows.append(row)
            if self.is_late():
                row.note = "skipped: no time left"
                continue
            try:
                row.error, peak = self._first_runs(variant)
            except torch.OutOfMemoryError:
                row.note = "out of memory"
            except Exception as error:
                if variant.is_ours:
                    raise
                # A peer's failure is a result about the peer.
                row.note = f"failed: {type(error).__name__}: {str(error)[:200]}"
            else:
                if largest_bytes:
                    row.peak_bytes, row.peak_share = peak, peak / largest_bytes
                alive.append((variant, row))
            self._forget()
        rounds = rounds or (3 if self.is_quick else 20 if self.is_cuda else 5)
        samples: dict[str, list[float]] = {variant.name: [] for variant, _ in alive}
        for _ in range(rounds):
            for variant, _ in alive:
                samples[variant.name].append(self._once(variant))
        for variant, row in alive:
            row.stats = stats_of(samples[variant.name])
        peers = [row for variant, row in alive if not variant.is_ours and row.stats]
        for row in rows:
            if peers and row.stats and peers[0].stats:
                row.speedup = peers[0].stats.median / row.stats.median
        self.rows += rows

    def _first_runs(self, variant: Variant) -> tuple[float | None, int]:
        """Error, and bytes over what was there before; compiles, allocates and warms up."""
        variant.prepare()
        result = variant.body()
        error = variant.measure(result) if variant.measure else None
        del result
        self._forget()
        variant.prepare()
        peak = PeakMemory(self.device)
        variant.body()
        return error, peak.bytes()

    def _once(self, variant: Variant) -> float:
        variant.prepare()
        if not self.is_cuda:
            begin = time.perf_counter()
            variant.body()
            return 1e3 * (time.perf_counter() - begin)
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        variant.body()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _forget(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def measure_ceilings(self) -> None:
        """GB/s of the best of three reductions, and of a copy."""
        numel = (64 << 20) if self.is_quick or not self.is_cuda else (2 << 30)
        x = torch.ones(numel, device=self.device)
        y = torch.empty_like(x)
        gigabytes = x.nbytes / 1e9
        readers = {
            "torch.sum": x.sum,
            "torch.amax": x.amax,
            "vector_norm": lambda: torch.linalg.vector_norm(x),
        }
        self.compare(
            "ceiling: read",
            f"{gigabytes:.2f} GB",
            [Variant(name, body) for name, body in readers.items()],
            gigabytes=gigabytes,
        )
        self.compare(
            "ceiling: copy",
            f"{gigabytes:.2f} GB",
            [Variant("copy_", lambda: y.copy_(x))],
            gigabytes=2 * gigabytes,
        )
        speeds = {"read": 0.0, "copy": 0.0}
        for row in self.rows:
            if row.stats and row.section.startswith("ceiling: "):
                kind = row.section.removeprefix("ceiling: ")
                speeds[kind] = max(speeds[kind], 1e3 * row.gigabytes / row.stats.median)
            row.speedup = None
        self.read_gbs, self.copy_gbs = speeds["read"], speeds["copy"]


class PeakMemory:
    """Memory from now on: torch's allocator on CUDA, the resident set on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self.before = self._status("VmRSS")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self.before
        return max(0, self._status("VmHWM") - self.before)

    @staticmethod
    def _status(key: str) -> int:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        if found is None:
            raise OSError(f"/proc/self/status has no {key}")
        return int(found[1]) * 1024


def stats_of(samples: Sequence[float]) -> Stats:
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    p10, median, p90 = torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist()
    return Stats(median, p10, p90, len(samples))


def write_json(path: Path | None, environment: object, **found: object) -> None:
    """What was found and where, the whole file or none of it; nothing without a path."""
    if path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"environment": environment, **found}, indent=1) + "\n")
        partial.rename(path)


def environment(
    device: torch.device, measured: Sequence[str] = ("csrc", "megarl/ops")
) -> dict[str, object]:
    """What a number is worth nothing without; `measured` is where a change counts."""

    def said(*command: str) -> str:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        return result.stdout.strip()

    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": said("git", "rev-parse", "HEAD"),
        "changed_since_commit": bool(said("git", "status", "--porcelain", *measured)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "cpu": re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "cuda_of_torch": torch.version.cuda,
            "driver_and_clocks": said(
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu",
                "--format=csv,noheader",
            ),
            "nvcc": said("nvcc", "--version").splitlines()[-2:],
        }
    return found
