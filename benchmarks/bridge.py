"""A push of new weights on this machine, by every way, in turns: seconds, pause and bytes.

    python benchmarks/bridge.py --json benchmarks/results/bridge_cpu.json

A random Qwen3 model of 107 million float32 parameters, Megatron ranks and vLLM workers, all over
gloo on the loopback interface. After each way's last push the servers' logprobs are compared
with transformers'; a difference is a failure, and nothing is reported.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers
from timing import CheckFailed, environment, stats_of, write_json

from megarl import parallel, platform
from megarl.actor.engine import MegatronEngine
from megarl.actor.weight_push import make_pusher
from megarl.bridge.push import Pusher
from megarl.bridge.sharded import ShardedSender
from megarl.config.schema import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    ParallelConfig,
    RolloutParallelConfig,
    TrainEngineConfig,
    VLLMConfig,
    WeightUpdateConfig,
)
from megarl.launch.placement import free_ports
from megarl.rollout.api import ModelRequest
from megarl.rollout.backends import make_client
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.servers import vllm_command, wait_healthy

transformers.utils.logging.disable_progress_bar()
_TIMEOUT_S = 600.0
# Sums in float32 in another order, through twelve layers; a wrong weight gives 0.01 and more.
_LOGPROB_BOUND = 1e-3
_PROMPT = list(range(11, 43))
_NUM_TOKENS = 16
WAYS: dict[str, dict[str, Any]] = {
    "broadcast": {"mode": "broadcast"},
    "sharded": {"mode": "sharded"},
    "sharded, overlap": {"mode": "sharded", "overlap": True},
    "disk": {"mode": "disk"},
}
"""The first is what the others are compared with."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Who sends and who receives."""

    name: str
    trainer: ParallelConfig
    num_ranks: int
    num_servers: int
    server_tp: int


SETUPS = [
    Setup("trainer tp2 -> vLLM tp2", ParallelConfig(tp=2), 2, 1, 2),
    Setup("trainer tp2*pp2 -> vLLM tp2", ParallelConfig(tp=2, pp=2), 4, 1, 2),
    Setup("trainer tp2 -> two vLLM tp1", ParallelConfig(tp=2), 2, 2, 1),
]


def model_config(*, is_quick: bool) -> transformers.Qwen3Config:
    hidden, layers, vocab = (64, 2, 512) if is_quick else (768, 12, 32768)
    return transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(2, hidden // 128),
        head_dim=64,
        intermediate_size=3 * hidden,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )


# ---------------------------------------------------------------- a trainer rank


def run_rank(rank: int, setup: Setup, folder: Path, addresses: list[str], pushes: int) -> Any:
    """Every way's pushes: name -> (total_s, pause_s) of each, and the bytes of one."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(setup.num_ranks), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    platform.setup()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    mesh = parallel.initialize(setup.trainer, seed=1)
    config = TrainEngineConfig(path=str(folder), parallel=setup.trainer, dtype="float32")
    engine = MegatronEngine(config, mesh)
    servers = None
    if rank == 0:
        clients = [
            make_client("vllm", address, request_timeout_s=_TIMEOUT_S, retries=0)
            for address in addresses
        ]
        servers = RemoteInferenceEngine(InferenceEngineConfig(), clients, batch_size=1)
        servers.initialize()
    pushers = {
        name: make_pusher(
            WeightUpdateConfig(bucket_bytes=32 << 20, timeout_s=_TIMEOUT_S, **options),
            servers,
            engine,
            folder=folder.parent / "weights",
        )
        for name, options in WAYS.items()
    }
    measured: dict[str, dict[str, Any]] = {name: {"times": []} for name in WAYS}
    version = 0
    # In turns. Each timed push follows one that is not: it makes the group, which the way before
    # has left, or the folder.
    for turn in range(pushes):
        for name, pusher in pushers.items():
            pusher.push(engine.export, version + 1)
            pushed = pusher.push(engine.export, version + 2)
            version += 2
            measured[name]["times"].append((pushed.total_s, pushed.pause_s))
            if turn == 0:
                measured[name] |= _bytes(pusher, pushed.num_bytes, mesh)
            if servers is not None and turn in (0, pushes - 1):
                _check_logprobs(name, servers, folder)
            pusher.close()
    if servers is not None:
        servers.destroy()
    return measured


def _bytes(pusher: Pusher, sent: int, mesh: parallel.Mesh) -> dict[str, Any]:
    total = torch.tensor([sent])
    dist.all_reduce(total, group=mesh.cpu_group)
    found: dict[str, Any] = {"bytes_sent": int(total)}
    if isinstance(pusher.sender, ShardedSender):
        into = pusher.sender.plan.bytes_into_workers()
        found |= {"bytes_into_workers": into.tolist()}
        found |= {"bytes_optimal": pusher.sender.plan.bytes_needed()}
    return found


def _check_logprobs(way: str, servers: RemoteInferenceEngine, folder: Path) -> None:
    """CheckFailed if a server's differ from transformers'."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gconfig = GenerationHyperparameters(ignore_eos=True)
    for client in servers.clients:
        asked = client.generate(ModelRequest(input_ids=_PROMPT), gconfig, _NUM_TOKENS)
        chunk = servers.run(asked, _TIMEOUT_S)
        with torch.no_grad():
            logits = model(torch.tensor([_PROMPT + chunk.tokens])).logits[0]
        want = torch.log_softmax(logits[len(_PROMPT) - 1 : -1], -1)
        want = want.gather(1, torch.tensor(chunk.tokens)[:, None])[:, 0]
        error = (want - torch.tensor(chunk.logprobs)).abs().max().item()
        if not error <= _LOGPROB_BOUND:
            raise CheckFailed(f"{way}: {client.address}: logprobs off by {error:.3g}")


def _rank_process(connection: Any, rank: int, *arguments: Any) -> None:
    try:
        connection.send((run_rank(rank, *arguments), None))
    except CheckFailed as error:
        connection.send((None, str(error)))


# ---------------------------------------------------------------- processes


@contextlib.contextmanager
def running_servers(setup: Setup, folder: Path) -> Iterator[list[str]]:
    """Their addresses, once they are healthy."""
    ports = free_ports(setup.num_servers)
    processes = []
    try:
        for index, port in enumerate(ports):
            command = vllm_command(
                str(folder),
                "127.0.0.1",
                port,
                vllm=VLLMConfig(dtype="float32", max_model_len=256, max_num_seqs=8),
                parallel=RolloutParallelConfig(tp=setup.server_tp),
                device="cpu",
                load_format="dummy",
                weight_backend=True,
                server_index=index,
            )
            log = (folder.parent / f"server{index}.log").open("wb")
            env = {**os.environ, **command.env}
            processes.append(subprocess.Popen(command.argv, env=env, stdout=log, stderr=log))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for address, process in zip(addresses, processes, strict=True):
            asyncio.run(wait_healthy(address, _TIMEOUT_S, lambda p=process: _ending(p)))
        yield addresses
    finally:
        for process in processes:
            for part in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    part.kill()
            process.wait()


def _ending(process: subprocess.Popen[bytes]) -> str | None:
    code = process.poll()
    return None if code is None else f"exit code {code}"


def measure(setup: Setup, folder: Path, pushes: int) -> list[dict[str, Any]]:
    """One row a way.

    Raises:
      CheckFailed: a server's logprobs are wrong, or a rank ended.
    """
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with running_servers(setup, folder) as addresses:
        pipes, ranks = [], []
        for rank in range(setup.num_ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, setup, folder, addresses, pushes)
            ranks.append(context.Process(target=_rank_process, args=arguments, daemon=True))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            measured, failure = pipes[0].recv()
        except EOFError:
            raise CheckFailed(f"{setup.name}: rank 0 ended") from None
        finally:
            for process in ranks:
                process.terminate()
                process.join()
    if failure:
        raise CheckFailed(f"{setup.name}: {failure}")
    first = next(iter(WAYS))
    base = stats_of([total for total, _ in measured[first]["times"]]).median
    rows = []
    for name, found in measured.items():
        totals, pauses = zip(*found.pop("times"), strict=True)
        total = stats_of(totals)
        row = {"setup": setup.name, "way": name, "total_s": dataclasses.asdict(total)}
        row |= {"pause_s": dataclasses.asdict(stats_of(pauses))}
        rows.append({**row, "speedup": base / total.median, **found})
    return rows


def report(found: dict[str, object], rows: list[dict[str, Any]]) -> str:
    lines = [f"{key}: {value}" for key, value in found.items()]
    setup = None
    for row in rows:
        if row["setup"] != setup:
            setup = row["setup"]
            lines += ["", setup]
            lines.append(
                f"  {'':<20}{'push s':>9}{'p10':>8}{'p90':>8}{'pause s':>9}{'x':>7}"
                f"{'MB out of trainer':>19}{'MB into workers':>17}"
            )
        total, into = row["total_s"], sum(row.get("bytes_into_workers", []))
        lines.append(
            f"  {row['way']:<20}{total['median']:>9.3f}{total['p10']:>8.3f}{total['p90']:>8.3f}"
            f"{row['pause_s']['median']:>9.3f}{row['speedup']:>7.2f}"
            f"{row['bytes_sent'] / 1e6:>19.1f}{f'{into / 1e6:.1f}' if into else '':>17}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one setup, one push")
    parser.add_argument("--pushes", type=int, default=7, help="timed, of each way")
    arguments = parser.parse_args()
    found = environment(torch.device("cpu"), ("benchmarks", "megarl"))
    config = model_config(is_quick=arguments.quick)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config).float()
        model.save_pretrained(folder)
        found["parameters"] = sum(p.numel() for p in model.parameters())
        del model
        try:
            for setup in SETUPS[:1] if arguments.quick else SETUPS:
                rows += measure(setup, folder, 1 if arguments.quick else arguments.pushes)
        except CheckFailed as error:
            print(f"FAILED {error}", file=sys.stderr)
            return 1
    found |= {"load_after": os.getloadavg()[0], "is_quick": arguments.quick}
    print(report(found, rows))
    write_json(arguments.json, found, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
