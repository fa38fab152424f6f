"""`bridge/forecast.py` against vLLM's own loader: every part of every tensor, at any tp and ep.

No server is started: one process at a time stands in for one worker, see traced_vllm.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import FAMILIES, tiny_config

from megarl.bridge.forecast import servers_layout
from megarl.config.schema import RolloutParallelConfig

pytestmark = [pytest.mark.server]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500.0  # 45 s for DeepSeek-V3 on one quiet core, most of it vLLM's own set-up
# tp, dp, whether experts are divided, rank. 300 rows of a vocabulary are padded to 320; 6 experts
# on 4 workers are 2, 2, 1 and 1; 2 KV heads on 4 workers are copied.
CASES = [
    *((1, 1, False, 0), (2, 1, False, 1), (4, 1, False, 0), (4, 1, False, 3)),
    *((4, 1, True, 0), (4, 1, True, 3), (2, 2, True, 1), (2, 2, True, 2), (1, 4, True, 2)),
]


def traced(folder, cases):
    """Parts of each tensor, by case."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "traced_vllm.py"), str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def forecast_parts(config, tp, dp, divided, rank):
    layout = servers_layout(
        config, RolloutParallelConfig(dp=dp, tp=tp), ep=tp * dp if divided else 1
    )
    needed = {}
    for name, held in layout.items():
        for box, ranks in zip(held.boxes, held.holders, strict=True):
            if rank in ranks and box.elements:
                needed.setdefault(name, []).append(list(box))
    return needed


def check(config, folder, cases):
    for case, found in zip(cases, traced(folder, cases), strict=True):
        wanted = forecast_parts(config, *case)
        wrong = [name for name in wanted | found if wanted.get(name) != found.get(name)]
        assert not wrong, (case, [(n, wanted.get(n), found.get(n)) for n in wrong[:5]])


VARIANTS = {
    **{family: (family, {}) for family in FAMILIES if family not in ("qwen3_moe", "deepseek_v3")},
    "qwen3_moe": ("qwen3_moe", {"num_experts": 6}),
    "deepseek_v3": ("deepseek_v3", {"n_routed_experts": 6, "n_group": 2, "topk_group": 2}),
    "deepseek_v3, all rows of q": ("deepseek_v3", {"q_lora_rank": None}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_take_what_is_forecast(tmp_path, variant):
    family, options = VARIANTS[variant]
    sizes = {"vocab": 300, "hidden_size": 64, "num_hidden_layers": 5, **options}
    config = tiny_config(family, tied=False, **sizes)
    config.architectures = [FAMILIES[family][1].__name__]
    config.save_pretrained(tmp_path)
    cases = [case for case in CASES if "experts" in str(config) or not case[2]]
    check(config.to_dict(), tmp_path, cases)


def test_workers_of_the_real_deepseek_take_what_is_forecast(tmp_path):
    """671 billion parameters at tp 32, and with experts divided over 64 workers of tp 8."""
    raw = json.loads((ROOT / "benchmarks" / "models" / "deepseek_v3.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(raw, tmp_path, [(32, 1, False, 31), (8, 8, True, 63)])
