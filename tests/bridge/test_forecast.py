"""`bridge/forecast.py` and `megarl plan`; against a real vLLM's own layout in tests/dist."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from tiny_models import tiny_config, tiny_hf

from megarl.bridge.boxes import Box
from megarl.bridge.forecast import forecast, servers_layout
from megarl.cli import main
from megarl.config.schema import ParallelConfig, RolloutParallelConfig

CONFIG = tiny_hf("qwen3_moe", tied=False).config.to_dict()
DEEPSEEK = tiny_config("deepseek_v3", tied=False, vocab=97, num_hidden_layers=5).to_dict()
REAL = Path(__file__).parents[2] / "benchmarks" / "models"
K_PROJ = "model.layers.3.self_attn.k_proj.weight"


def test_kv_heads_are_copied_where_there_are_fewer_than_workers():
    layout = servers_layout(CONFIG, RolloutParallelConfig(tp=4))
    assert layout[K_PROJ].boxes == (Box(0, 16, 0, 32), Box(16, 32, 0, 32))
    assert layout[K_PROJ].holders == ((0, 1), (2, 3))
    q_proj = layout[K_PROJ.replace("k_proj", "q_proj")]
    assert q_proj.holders == ((0,), (1,), (2,), (3,))


def test_stages_of_servers_hold_their_layers():
    layout = servers_layout(CONFIG, RolloutParallelConfig(dp=2, tp=2, pp=2))
    expert = layout["model.layers.0.mlp.experts.1.down_proj.weight"]
    assert expert.boxes == (Box(0, 32, 0, 12), Box(0, 32, 12, 24))
    assert expert.holders == ((0, 4), (1, 5))
    assert layout["model.layers.3.mlp.gate.weight"].holders == ((2, 3, 6, 7),)
    assert layout["lm_head.weight"].holders == ((2, 6), (3, 7))
    assert layout["model.embed_tokens.weight"].holders == ((0, 4), (1, 5))


def test_experts_are_divided_among_a_set_of_servers():
    """Eight experts on a set of two servers of tp 2, and another such set."""
    servers = RolloutParallelConfig(dp=4, tp=2)
    layout = servers_layout(DEEPSEEK, servers, ep=4)
    for expert in range(8):
        held = layout[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert held.boxes == (Box(0, 12, 0, 32),)  # whole
        assert held.holders == ((expert // 2, expert // 2 + 4),)
    # Tokens are divided before the experts, so all workers need the shared one whole.
    shared = layout["model.layers.1.mlp.shared_experts.down_proj.weight"]
    assert shared.holders == (tuple(range(8)),)
    dense = layout["model.layers.0.mlp.down_proj.weight"]
    assert dense.holders == ((0, 2, 4, 6), (1, 3, 5, 7))
    # On one server they are not, and a shared expert is cut as without.
    of_one = servers_layout(DEEPSEEK, servers, ep=2)
    shared = of_one["model.layers.1.mlp.shared_experts.down_proj.weight"]
    assert shared.holders == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("ep", [3, 4, 5])
def test_workers_have_as_many_experts_or_one_more(ep):
    layout = servers_layout(DEEPSEEK, RolloutParallelConfig(dp=ep), ep=ep)
    counts = Counter(
        rank
        for name, held in layout.items()
        if name.startswith("model.layers.2.mlp.experts.") and "gate_proj" in name
        for rank in held.holders[0]
    )
    assert sum(counts.values()) == 8
    assert [counts[rank] for rank in range(ep)] == sorted(counts.values(), reverse=True)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(("tp", "dp", "ep"), [(4, 1, 2), (2, 3, 4), (4, 4, 6)])
def test_sets_of_experts_that_servers_do_not_make_are_named(tp, dp, ep):
    with pytest.raises(ValueError, match=f"experts on {ep} workers: {dp} servers of tp {tp}"):
        servers_layout(DEEPSEEK, RolloutParallelConfig(dp=dp, tp=tp), ep=ep)


def test_a_vocabulary_is_padded_before_it_is_cut():
    """97 rows are 128 to vLLM: 64 and 33, not 48 and 49."""
    layout = servers_layout(DEEPSEEK, RolloutParallelConfig(tp=2))
    assert layout["lm_head.weight"].boxes == (Box(0, 64, 0, 32), Box(64, 97, 0, 32))


def test_layers_left_over_go_to_the_stages_before_the_last():
    layout = servers_layout(DEEPSEEK, RolloutParallelConfig(pp=3))
    stages = [layout[f"model.layers.{i}.input_layernorm.weight"].holders[0][0] for i in range(5)]
    assert stages == [0, 0, 1, 1, 2]


def test_numbers_of_a_push():
    made = forecast(
        CONFIG,
        ParallelConfig(tp=2, ep=2, etp=1),
        4,
        RolloutParallelConfig(dp=2, tp=2),
        itemsize=2,
        bucket_bytes=1 << 14,
    )
    assert made.parameters == sum(p.numel() for p in tiny_hf("qwen3_moe", tied=False).parameters())
    assert made.model_bytes == 2 * made.parameters
    # Each byte leaves the trainer once, and enters the two servers once by themselves.
    assert made.out_of_trainer.mean * 4 == made.model_bytes
    assert made.into_worker_from_trainer.mean * 4 == made.model_bytes
    assert made.into_worker.mean == made.optimal_into_worker
    passed_on = made.passed_on_by_worker.mean
    assert made.into_worker.mean == made.into_worker_from_trainer.mean + passed_on
    assert made.sharded_s(1e9) < made.broadcast_s(1e9) == made.model_bytes / 1e9


def test_the_command(capsys):
    assert main(["plan", "configs/quickstart.yaml", "--json", "--link", "8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trainer_ranks"] == 2
    assert answer["broadcast_s"] == answer["model_bytes"] / 1e9
    assert main(["plan", "configs/quickstart.yaml"]) == 0
    assert "396,032 parameters, 1.58 MB, from 2 trainer ranks" in capsys.readouterr().out


def test_the_command_on_a_model_of_671_billion(capsys, tmp_path):
    (tmp_path / "config.json").write_text((REAL / "deepseek_v3.json").read_text())
    command = [
        *("plan", "configs/quickstart.yaml", "--json", "--link", "400"),
        *(f"actor.path={tmp_path}", "actor.dtype=bfloat16", "actor.world_size=64"),
        *("actor.parallel.pp=8", "actor.parallel.ep=8", "actor.parallel.etp=1"),
        *("rollout.parallel.tp=8", "rollout.parallel.dp=2"),
    ]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == 671_026_419_200
    # In bfloat16, but for 58 routers' biases.
    assert answer["model_bytes"] == 2 * answer["parameters"] + 2 * 58 * 256
    assert answer["out_of_trainer"]["mean"] * 64 == answer["model_bytes"]
    assert answer["into_worker"]["mean"] == answer["optimal_into_worker"]
    assert answer["into_worker"]["mean"] > answer["model_bytes"] / 8  # latents are not cut


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor.path=nowhere"], "actor.path"),
        (["--link", "0"], "--link: must be > 0"),
        (["actor.parallel.tp=4", "actor.world_size=4"], "actor.parallel: .* do not divide by tp 4"),
    ],
)
def test_what_cannot_be_planned_is_named(capsys, arguments, message):
    assert main(["plan", "configs/quickstart.yaml", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
