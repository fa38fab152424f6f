"""The push of a model's weights from trainer to servers, planned: how much moves, and how evenly.

    python benchmarks/bridge_plan.py [--json FILE] [--model NAME ...] [--gpus N ...]

On paper: no GPU, no rank and no server is started. The plan is the one that a push would follow,
made by the same function; its seconds are the bytes of the busiest rank over the speed of its
link, one network card of 400 Gbit/s a GPU, as in the published setups. Nothing else is in them:
no packing, no latency, no kernel, and no faster link inside a node. The published seconds beside
them were measured, by others and on their machines. What the two can be compared for is how far
a measurement is above the bytes it must move.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import ROOT, environment, write_json

sys.path.append(str(ROOT))  # where megarl is not installed, from here

from megarl.bridge.forecast import Forecast, forecast
from megarl.bridge.layout import hf_tensors, trainer_layout
from megarl.config.schema import ParallelConfig, RolloutParallelConfig

FOLDER = Path(__file__).parent / "models"
"""config.json of each model, as published, without the entries for remote code."""
MODELS = ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "kimi_k2")
LINK_GBIT_S = 400.0
"""Of each GPU, in each direction."""
BUCKET_BYTES = 1 << 28
"""weight_update.bucket_bytes as a run has it if it says nothing."""
GPU_BYTES = 80e9
RESERVED_BYTES = 16e9
"""Of a GPU, for what is neither weight, gradient nor optimizer: activations, KV cache, buffers."""
SIZES = (32, 64, 128, 256, 512, 1024)


STATE_BYTES = 18
"""Of a parameter that one rank trains: bfloat16 weight, float32 gradient, and the optimizer's
weight and two moments in float32, which are divided among the parameter's copies."""
SIZES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Setup:
    """A model on some GPUs: trainer ranks, and servers."""

    model: str
    trainer_ranks: int
    parallel: ParallelConfig
    servers: RolloutParallelConfig
    server_ep: int = 1
    """See forecast.servers_layout."""
    is_published: bool = False
    """Others' layout, planned whether or not our trainer's states fit into it."""

    @property
    def gpus(self) -> int:
        return self.trainer_ranks + self.servers.world_size


def _trainer(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes, etp=1)  # an expert is never cut


def _servers(dp: int, tp: int) -> RolloutParallelConfig:
    return RolloutParallelConfig(dp=dp, tp=tp)


SETUPS = (
    # Half trainer, half servers, as long as the trainer's states fit into a half; more trainer
    # where they do not. A server has as few GPUs as hold the model, or divides its experts over
    # 64 (then tp 8 and sets of eight servers).
    Setup("qwen3_30b_a3b", 16, _trainer(pp=2, ep=8), _servers(4, 4)),
    Setup("qwen3_30b_a3b", 32, _trainer(pp=2, ep=8), _servers(8, 4)),
    Setup("qwen3_30b_a3b", 64, _trainer(pp=2, ep=8), _servers(16, 4)),
    Setup("qwen3_30b_a3b", 128, _trainer(pp=2, ep=8), _servers(32, 4)),
    Setup("qwen3_30b_a3b", 256, _trainer(pp=2, ep=8), _servers(64, 4)),
    Setup("qwen3_30b_a3b", 512, _trainer(pp=2, ep=8), _servers(128, 4)),
    Setup("qwen3_235b_a22b", 96, _trainer(pp=6, tp=4, ep=16), _servers(4, 8)),
    Setup("qwen3_235b_a22b", 128, _trainer(pp=8, tp=4, ep=16), _servers(16, 8)),
    Setup("qwen3_235b_a22b", 256, _trainer(pp=8, tp=4, ep=32), _servers(32, 8)),
    Setup("qwen3_235b_a22b", 512, _trainer(pp=8, tp=4, ep=32), _servers(64, 8)),
    Setup("deepseek_v3", 224, _trainer(pp=7, tp=4, ep=32), _servers(1, 32)),
    Setup("deepseek_v3", 256, _trainer(pp=16, tp=4, ep=16), _servers(8, 32)),
    Setup("deepseek_v3", 256, _trainer(pp=16, tp=4, ep=16), _servers(32, 8), 64),
    Setup("deepseek_v3", 512, _trainer(pp=16, tp=4, ep=32), _servers(16, 32)),
    Setup("deepseek_v3", 512, _trainer(pp=16, tp=4, ep=32), _servers(64, 8), 64),
    Setup("kimi_k2", 384, _trainer(pp=12, tp=4, ep=32), _servers(16, 8), 64),
    Setup("kimi_k2", 512, _trainer(pp=16, tp=4, ep=32), _servers(64, 8), 64),
    # Published; what is not known of them (tp where only pp and ep are named) is 1.
    Setup("qwen3_30b_a3b", 16, _trainer(pp=2, ep=8), _servers(2, 8), is_published=True),
    Setup("deepseek_v3", 256, _trainer(pp=16, ep=16), _servers(8, 32), is_published=True),
    Setup(
        "kimi_k2", 256, _trainer(tp=8, pp=8, cp=4, ep=32), _servers(32, 8), 32, is_published=True
    ),
)


@dataclass(frozen=True)
class Published:
    """A push that was measured, not by us."""

    model: str
    trainer_ranks: int
    workers: int
    seconds: str
    what: str
    source: str


PUBLISHED = (
    Published(
        *("qwen3_30b_a3b", 16, 16, "0.74-1.00"),
        "NeMo-RL nccl_reshard, bfloat16, H100, 400 Gbit/s a rank",
        "NeMo-RL docs/design-docs/nccl-reshard-refit.md",
    ),
    Published(
        *("qwen3_30b_a3b", 16, 16, "2.16 (broadcast 2.67)"),
        "miles P2P, 2 H100 nodes a side",
        "miles docs/advanced/p2p-weight-transfer.md",
    ),
    Published(
        *("qwen3_235b_a22b", 64, 64, "3.16 (broadcast 10.75)"),
        "miles P2P, 8 H100 nodes a side",
        "miles docs/advanced/p2p-weight-transfer.md",
    ),
    Published(
        *("qwen3_235b_a22b", 128, 32, "2"),
        "RDMA WRITE by a static schedule",
        "le.qun.ch/en/blog/2025/09/07/rl-weight-transfer",
    ),
    Published(
        *("deepseek_v3", 256, 256, "2.39-2.83"),
        "NeMo-RL nccl_reshard, bfloat16, H100, PP16 EP16 to TP32 DP8, 400 Gbit/s a rank",
        "NeMo-RL docs/design-docs/nccl-reshard-refit.md",
    ),
    Published(
        *("kimi_k2", 256, 256, "7.23 (broadcast 53.28)"),
        "miles P2P, 32 H100 nodes a side, TP8 PP8 CP4 EP32 to EP32; 0.88 s of it is requantising",
        "miles docs/advanced/p2p-weight-transfer.md",
    ),
    Published(
        *("kimi_k2", 256, 128, "1.3"),
        "RDMA WRITE by a static schedule, bfloat16 cast to fp8 on the way: half the bytes",
        "research.perplexity.ai, weight transfer for RL post-training in under 2 seconds",
    ),
)


def rows(
    models: Sequence[str] | None = None, sizes: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """One row a layout; of a size that no layout of a model fits into, a row with the reason."""
    for model in models or MODELS:
        config = json.loads((FOLDER / f"{model}.json").read_text(encoding="utf-8"))
        parameters = sum(t.rows * t.columns for t in hf_tensors(config, 2).values())
        for gpus in sizes or SIZES:
            if reason := _too_large(parameters, gpus):
                yield {"model": model, "gpus": gpus, "left_out": reason}
            for setup in SETUPS:
                if (setup.model, setup.gpus) == (model, gpus):
                    yield planned(setup, config)


def _too_large(parameters: int, gpus: int) -> str:
    """Why no layout holds the model, whatever the parallelism; empty if one may."""
    states, weights = STATE_BYTES * parameters, 2 * parameters
    room = gpus * (GPU_BYTES - RESERVED_BYTES)
    if states + weights <= room:
        return ""
    return (
        f"{states / 1e9:,.0f} GB of the trainer's states and {weights / 1e9:,.0f} GB of one "
        f"server's weights are more than {gpus} GPUs have, {room / 1e9:,.0f} GB without a reserve "
        f"of {RESERVED_BYTES / 1e9:.0f} GB each"
    )


def planned(setup: Setup, config: dict[str, Any]) -> dict[str, Any]:
    """The row of one layout."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = forecast(
        config,
        setup.parallel,
        setup.trainer_ranks,
        setup.servers,
        itemsize=2,
        bucket_bytes=BUCKET_BYTES,
        server_ep=setup.server_ep,
    )
    planning = {
        "planning_cpu_s": time.process_time() - cpu,
        "planning_wall_s": time.perf_counter() - wall,
    }
    states = trainer_state_bytes(config, setup.parallel, setup.trainer_ranks)
    room = GPU_BYTES - RESERVED_BYTES
    row = {
        "model": setup.model,
        "gpus": setup.gpus,
        "trainer": f"{setup.trainer_ranks}: {_named(setup.parallel)}",
        "servers": f"{setup.servers.dp} of tp {setup.servers.tp}"
        + (f", experts over {setup.server_ep}" if setup.server_ep > 1 else ""),
        "is_published_layout": setup.is_published,
        "trainer_state_gb": states / 1e9,
        "server_weights_gb": made.into_worker.most / 1e9,
    }
    fits = max(states, made.into_worker.most) <= room
    if not fits and not setup.is_published:
        return {**row, "left_out": f"a rank's states or weights are over {room / 1e9:.0f} GB"}
    return {**row, "fits": fits, **planning, **_numbers(made), "published": _published(setup)}


def _numbers(made: Forecast) -> dict[str, Any]:
    link = LINK_GBIT_S * 1e9 / 8
    loads = {
        "out_of_trainer": made.out_of_trainer,
        "into_worker": made.into_worker,
        "passed_on_by_worker": made.passed_on_by_worker,
    }
    gigabytes = {
        f"{name}_{which}_gb": value / 1e9
        for name, load in loads.items()
        for which, value in (("max", load.most), ("mean", load.mean))
    }
    return {
        "parameters": made.parameters,
        "transfers": made.transfers,
        "rounds": made.rounds,
        **gigabytes,
        "optimum_into_worker_gb": made.optimal_into_worker / 1e9,
        "link_gbit_s": LINK_GBIT_S,
        "optimum_s": made.optimal_into_worker / link,
        "estimate_s": made.sharded_s(link),
        "estimate_of_broadcast_s": made.broadcast_s(link),
    }


def _published(setup: Setup) -> list[dict[str, Any]]:
    """What was measured on as many trainer ranks and workers."""
    shape = (setup.model, setup.trainer_ranks, setup.servers.world_size)
    return [asdict(p) for p in PUBLISHED if (p.model, p.trainer_ranks, p.workers) == shape]


def _named(parallel: ParallelConfig) -> str:
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def trainer_state_bytes(config: dict[str, Any], parallel: ParallelConfig, world_size: int) -> int:
    """Of the fullest rank: weights, gradients, and its share of the optimizer."""
    in_stage = world_size // parallel.pp
    shared = {
        True: in_stage // (parallel.ep * parallel.expert_tp),
        False: in_stage // parallel.tp,
    }
    # Tensors that are cut and held alike share their boxes and holders.
    alike: Counter[tuple[int, int, bool]] = Counter()
    layout = trainer_layout(config, parallel, world_size)
    kinds = {}
    for name, held in layout.items():
        key = (id(held.boxes), id(held.holders), ".experts." in name)
        alike[key] += 1
        kinds[key] = held
    states = np.zeros(world_size)
    for key, count in alike.items():
        each = count * (6 + (STATE_BYTES - 6) / shared[key[2]])
        for box, ranks in zip(kinds[key].boxes, kinds[key].holders, strict=True):
            states[list(ranks)] += box.elements * each
    return int(states.max())


def table(found: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{'model':<16}{'GPUs':>5}  {'trainer':<26}{'servers':<28}{'plan s':>7}{'transfers':>11}"
        f"{'rounds':>7}{'out GB':>14}{'in GB':>14}{'optimum s':>10}{'estimate s':>11}"
        f"{'broadcast s':>12}  measured by others, s"
    ]
    for row in found:
        head = f"{row['model']:<16}{row['gpus']:>5}  "
        if "left_out" in row:
            lines.append(head + f"left out: {row['left_out']}")
            continue
        out = f"{row['out_of_trainer_mean_gb']:.3g}/{row['out_of_trainer_max_gb']:.3g}"
        into = f"{row['into_worker_mean_gb']:.3g}/{row['into_worker_max_gb']:.3g}"
        lines.append(
            head
            + f"{row['trainer']:<26}{row['servers']:<28}{row['planning_cpu_s']:>7.1f}"
            + f"{row['transfers']:>11,}{row['rounds']:>7}{out:>14}{into:>14}"
            + f"{row['optimum_s']:>10.2f}{row['estimate_s']:>11.2f}"
            + f"{row['estimate_of_broadcast_s']:>12.1f}  "
            + "; ".join(p["seconds"] for p in row["published"])
            + ("" if row["fits"] else " (our trainer's states do not fit)")
        )
    lines.append(
        f"out of a trainer rank, into a worker: mean/max. Estimates are bytes at {LINK_GBIT_S:g} "
        "Gbit/s a GPU, on paper; the last column was measured."
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, choices=SIZES, default=SIZES)
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    about["numpy"] = np.__version__
    about["changed_since_commit"] = _changed()
    found = list(rows(arguments.model, arguments.gpus))
    about["load_after"] = os.getloadavg()[0]
    print(table(found))
    write_json(
        arguments.json,
        about,
        meaning=" ".join((__doc__ or "").split("\n\n", 2)[2].split()),
        gpu_gb=GPU_BYTES / 1e9,
        reserved_gb=RESERVED_BYTES / 1e9,
        bucket_bytes=BUCKET_BYTES,
        rows=found,
        published=[asdict(p) for p in PUBLISHED],
    )
    return 0


def _changed() -> bool:
    """Whether what is measured differs from the commit."""
    paths = ("megarl/bridge", "megarl/model", "benchmarks/bridge_plan.py", "benchmarks/models")
    command = ["git", "status", "--porcelain", *paths]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return bool(result.stdout.strip())


if __name__ == "__main__":
    sys.exit(main())
