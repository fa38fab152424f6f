"""Do trainer, servers and HF compute the same model? One row a question; run before a long job.

The trainer is built as the run's config says, on all its ranks; the reference is transformers
on rank 0, in float32. Bounds for float32 are those of rounding; in bfloat16 a number may be
off by twice what transformers itself is off in bfloat16.
"""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl import platform
from megarl.actor.engine import DTYPES, MegatronEngine
from megarl.actor.micro_batch import Batch
from megarl.actor.state import latest_state
from megarl.actor.weights_state import load_weights
from megarl.bridge.push import Members, Pusher, Together
from megarl.bridge.sender import BroadcastSender
from megarl.config.load import load
from megarl.config.run import GRPOConfig
from megarl.model import families
from megarl.model.build import read_hf_config
from megarl.model.layout import Piece
from megarl.model.weights import SafetensorsFolder
from megarl.parallel import Mesh
from megarl.rollout.api import ModelRequest, ModelResponse
from megarl.rollout.backends import make_client
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.servers import wait_healthy
from megarl.rollout.workflows.rlvr import to_trajectory
from megarl.train import trainer_rank
from megarl.trajectory import concat_padded

REPORT = "verify.json"
_MAX_NAMED = 5

# Sums in float32 in another order, through all layers: some 1e-6 of the largest logit for a
# model of 30 layers. A wrong weight or rotary base gives 1e-2 and more.
_FLOAT32_LOGITS = 1e-4
"""Of the largest logit."""
_FLOAT32_LOGPROB = 1e-3
"""In nats."""
_BF16_SLACK = 2.0
_BF16_SERVER_LOGPROB = 0.5
"""In nats, of any one token: both sides round each activation to 8 bits."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    measured: float
    bound: float
    detail: str = ""
    """What is wrong, by name; or what was compared."""

    @property
    def ok(self) -> bool:
        return self.measured <= self.bound  # nan is not

    def as_row(self) -> dict[str, Any]:
        """For JSON, which has neither nan nor infinity: null."""
        measured = self.measured if math.isfinite(self.measured) else None
        return {**asdict(self), "measured": measured, "ok": self.ok}


def verify(config: GRPOConfig, mesh: Mesh, options: argparse.Namespace) -> list[Check]:
    """Every check, on rank 0; the others get no rows. Collective over the world."""
    torch.manual_seed(config.seed)
    engine = MegatronEngine(replace(config.actor, optimizer=None), mesh)
    if options.state is not None:
        load_weights(engine, _state_folder(options.state))
    batch = _random_batch(engine, mesh)
    logp = engine.forward(batch)
    logits = _on_rank_0(engine.logits(batch), batch, engine, mesh)
    checks: list[Check] = []
    if mesh.rank == 0:
        checks += _config_checks(engine.spec.hf_config, options.reference)
        checks += _compare_with_hf(engine, options.reference, batch, logits, logp)
    checks += _roundtrip(engine, options.reference, mesh)
    addresses = os.environ.get("MEGARL_SERVER_ADDRS")
    if addresses:
        checks += _compare_with_servers(config, engine, mesh, addresses.split(","))
    return checks


def _state_folder(path: Path) -> Path:
    """A training state, or the newest one of RUN/recover."""
    return latest_state(path) or path


def _random_batch(engine: MegatronEngine, mesh: Mesh) -> Batch:
    """Tokens that no tokenizer would put together, the same on all ranks."""
    limit = engine.config.mb_spec.max_tokens_per_mb or 1 << 30
    longest = min(96, limit, engine.spec.hf_config["max_position_embeddings"])
    count = max(4, 2 * mesh.parallel.pp)
    lengths = torch.linspace(2, longest, count).int()
    generator = torch.Generator().manual_seed(1)
    shape = (count, int(lengths.max()))
    tokens = torch.randint(0, engine.spec.vocab_size, shape, generator=generator)
    valid = torch.arange(shape[1]) < lengths[:, None]
    return {"input_ids": torch.where(valid, tokens, 0).int(), "attention_mask": valid}


def _on_rank_0(
    logits: list[Tensor], batch: Batch, engine: MegatronEngine, mesh: Mesh
) -> list[Tensor]:
    """The last stage's logits, float32 on the CPU, on rank 0."""
    if mesh.parallel.pp == 1:
        return [x.float().cpu() for x in logits]
    lengths = batch["attention_mask"].sum(1).tolist()
    source = (mesh.parallel.pp - 1) * mesh.world_size // mesh.parallel.pp
    if mesh.rank == source:
        for x in logits:
            dist.send(x.float().cpu().contiguous(), 0, group=mesh.cpu_group)
    received = []
    if mesh.rank == 0:
        for length in lengths:
            row = torch.empty(length, engine.spec.vocab_size)
            dist.recv(row, source, group=mesh.cpu_group)
            received.append(row)
    return received


# ---------------------------------------------------------------- against transformers


def _config_checks(mine: dict[str, Any], reference: Path) -> list[Check]:
    """Values of config.json that the computation depends on."""
    wrong = _config_differences(mine, read_hf_config(reference))
    return [Check("config.json, values that differ", len(wrong), 0, "; ".join(wrong))]


def _config_differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    ours, reference = (_computing_values(c) for c in (mine, theirs))
    return [
        f"{key} {ours.get(key)!r}, reference {reference.get(key)!r}"
        for key in sorted(ours.keys() | reference.keys())
        if ours.get(key) != reference.get(key)
    ]


def _computing_values(c: dict[str, Any]) -> dict[str, Any]:
    names = (
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "n_routed_experts"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
        *("routed_scaling_factor", "rope_interleave"),
    )
    values = {name: c[name] for name in names if c.get(name) is not None}
    values["tie_word_embeddings"] = bool(c.get("tie_word_embeddings", False))
    # transformers 5 nests the rotary options and renames the number of experts.
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    values["rope_theta"] = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    values |= {f"rope {key}": x for key, x in rope.items() if key not in ("rope_theta", "type")}
    values["rope rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    return values


@torch.no_grad()
def _hf_logits(folder: Path, dtype: torch.dtype, rows: list[Tensor]) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    return [model(input_ids=row[None].long()).logits[0].float() for row in rows]


def _compare_with_hf(
    engine: MegatronEngine, reference: Path, batch: Batch, logits: list[Tensor], logp: Tensor
) -> list[Check]:
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [ids[:n] for ids, n in zip(batch["input_ids"], lengths, strict=True)]
    exact = _hf_logits(reference, torch.float32, rows)
    ours = [logp[i, : n - 1] for i, n in enumerate(lengths)]
    largest = max(x.abs().max().item() for x in exact)
    bounds = (_FLOAT32_LOGITS * largest, _FLOAT32_LOGPROB)
    dtype = DTYPES[engine.config.dtype]
    if dtype != torch.float32:
        rounded = _hf_logits(reference, dtype, rows)
        bounds = (
            _BF16_SLACK * _largest_gap(rounded, exact),
            _BF16_SLACK
            * _largest_gap(_label_logprobs(rounded, rows), _label_logprobs(exact, rows)),
        )
    tokens = f"{sum(lengths)} tokens, largest logit {largest:.1f}"
    if any(x.shape != y.shape for x, y in zip(logits, exact, strict=True)):
        return [Check("logits, Megatron - HF", torch.inf, bounds[0], "other shapes")]
    temperature = engine.config.temperature
    scaled = [x / temperature for x in exact]
    gap = _largest_gap(ours, _label_logprobs(scaled, rows))
    return [
        Check("logits, Megatron - HF", _largest_gap(logits, exact), bounds[0], tokens),
        Check("logprobs, Megatron - HF", gap, bounds[1], "nats"),
    ]


def _label_logprobs(logits: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
    return [
        torch.log_softmax(x[:-1], dim=-1).gather(1, row[1:, None].long())[:, 0]
        for x, row in zip(logits, rows, strict=True)
    ]


def _largest_gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def _roundtrip(engine: MegatronEngine, reference: Path, mesh: Mesh) -> list[Check]:
    """Each exported tensor against the file it should have come from, bit for bit."""
    if mesh.rank != 0:
        for _ in engine.export:
            raise AssertionError("only rank 0 is given tensors")
        return []
    wrong, seen = [], set()
    with SafetensorsFolder(reference) as source:
        config = read_hf_config(reference)
        names = {name for name in source.names() if not families.is_untrained(config, name)}
        if engine.spec.tied_embeddings:
            names.discard("lm_head.weight")  # some files repeat the embedding
        for name, tensor in engine.export:
            seen.add(name)
            if name not in names:
                wrong.append(f"{name} (not in the reference)")
                continue
            shape = source.shape(name)
            want = source.read(Piece(name, 0, 0, 0, shape[0])).to(tensor.dtype)
            if want.shape != tensor.shape or not torch.equal(want, tensor.cpu()):
                wrong.append(name)
    wrong += [f"{name} (missing)" for name in sorted(names - seen)]
    detail = _named(wrong) if wrong else f"{len(seen)} tensors"
    return [Check("HF -> Megatron -> HF, tensors that differ", len(wrong), 0, detail)]


def _named(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# ---------------------------------------------------------------- against the servers


def _compare_with_servers(
    config: GRPOConfig, engine: MegatronEngine, mesh: Mesh, addresses: list[str]
) -> list[Check]:
    """Push the weights, sample some tokens, and compute their logprobs here."""
    checks: list[Check] = []
    shared: list[Any] = [None]
    with _servers(config, addresses if mesh.rank == 0 else []) as servers:
        sent = _push(config, engine, servers)
        if servers is not None:
            checks.append(_compare_digests(config, servers, sent))
            sampled = _sample(config, servers, engine, len(addresses))
            responses = servers.run(sampled, None)
            shared[0] = concat_padded([to_trajectory(response, 0.0) for response in responses])
    dist.broadcast_object_list(shared, 0, group=mesh.cpu_group)
    batch: Batch = shared[0]
    logp = engine.forward(batch)
    if mesh.rank != 0:
        return []
    mask = batch["loss_mask"].roll(-1, dims=1).bool()
    mask[:, -1] = False
    gap = (logp - batch["logprobs"].roll(-1, dims=1))[mask].abs()
    bound = _FLOAT32_LOGPROB if engine.config.dtype == "float32" else _BF16_SERVER_LOGPROB
    if engine.config.dtype != config.engine.dtype:
        bound = _BF16_SERVER_LOGPROB
    detail = f"nats, mean {gap.mean().item():.2g}, {int(mask.sum())} sampled tokens"
    checks.append(Check("logprobs, trainer - server", gap.max().item(), bound, detail))
    return checks


@contextmanager
def _servers(config: GRPOConfig, addresses: list[str]) -> Iterator[RemoteInferenceEngine | None]:
    """All of them, healthy; None if there are none."""
    if not addresses:
        yield None
        return
    options = replace(config.rollout, servers=None)  # those of its own, not a training run's
    clients = [
        make_client(
            options.backend,
            f"http://{address}",
            request_timeout_s=options.request_timeout_s,
            retries=options.request_retries,
        )
        for address in addresses
    ]
    servers = RemoteInferenceEngine(options, clients, batch_size=1)
    servers.initialize()
    try:
        for client in clients:
            waited = wait_healthy(client.address, options.setup_timeout_s)
            servers.run(waited, options.setup_timeout_s + 60)
        servers.start_health_watch()
        yield servers
    finally:
        servers.destroy()


def _push(
    config: GRPOConfig, engine: MegatronEngine, servers: RemoteInferenceEngine | None
) -> dict[str, int]:
    """The weights, gathered, into every server; a digest of each tensor, on rank 0. Collective."""
    update, sent = config.weight_update, dict[str, int]()
    together, members = Together(engine.mesh.cpu_group), Members(servers)
    sender = BroadcastSender(
        members,
        together,
        bucket_bytes=update.bucket_bytes,
        timeout_s=update.timeout_s,
        device=platform.device(),
        digests=sent,
    )
    pusher = Pusher(members, sender, together, pause=update.pause, timeout_s=update.timeout_s)
    pusher.push(engine.export, 1)
    if servers is not None:
        servers.set_version(1)
    pusher.close()
    return sent


def _compare_digests(
    config: GRPOConfig, servers: RemoteInferenceEngine, sent: dict[str, int]
) -> Check:
    limit = config.weight_update.timeout_s
    held = [servers.run(client.weight_digests(), limit) for client in servers.clients]
    wrong, workers = [], [digests for server in held for digests in server]
    for digests in workers:
        wrong += [name for name in sent if digests.get(name) != sent[name]]
    detail = (
        _named(sorted(set(wrong))) if wrong else f"{len(sent)} tensors x {len(workers)} workers"
    )
    return Check("weights at the servers, tensors that differ", len(wrong), 0, detail)


async def _sample(
    config: GRPOConfig, servers: RemoteInferenceEngine, engine: MegatronEngine, num_servers: int
) -> list[ModelResponse]:
    """A few responses of every server, sampled as the run samples."""
    room = (config.engine.max_model_len or 1 << 30) - config.gconfig.max_new_tokens
    length = max(1, min(16, room))
    gconfig = config.gconfig.new(
        n_samples=1,
        max_new_tokens=min(64, config.gconfig.max_new_tokens),
        min_new_tokens=0,
        ignore_eos=True,
        seed=None,
        stop=None,
        stop_token_ids=[],
    )
    generator = torch.Generator().manual_seed(2)
    shape = (4 * num_servers, length)
    prompts = torch.randint(0, engine.spec.vocab_size, shape, generator=generator).tolist()
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(servers.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig)))
            for ids in prompts
        ]
    return [task.result() for task in asked]


def main(arguments: list[str]) -> int:
    """`python -m megarl.verify RUN_DIR --reference DIR [--state DIR]`, started once a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args(arguments)
    config = load(options.run_dir / "config.yaml", [])
    disable_progress_bar()
    with trainer_rank(config, config.actor.parallel) as mesh:
        checks = verify(config, mesh, options)
        if mesh.rank == 0:
            rows = [check.as_row() for check in checks]
            partial = options.run_dir / f"{REPORT}.partial"
            partial.write_text(json.dumps({"checks": rows}, indent=2) + "\n", encoding="utf-8")
            partial.rename(options.run_dir / REPORT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
