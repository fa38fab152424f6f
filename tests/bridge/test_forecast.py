"""`bridge/forecast.py` and `megarl plan`; against a real vLLM's own layout in tests/dist."""

import json
import re

import pytest
from tiny_models import tiny_hf

from megarl.bridge.boxes import Box
from megarl.bridge.forecast import forecast, servers_layout
from megarl.cli import main
from megarl.config.schema import ParallelConfig, RolloutParallelConfig

CONFIG = tiny_hf("qwen3_moe", tied=False).config.to_dict()
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
