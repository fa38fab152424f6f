"""A DeepSeek from Megatron ranks into a real vLLM, which computes attention from the latents."""

import pytest
from test_sharded_push import SIZES, check_logprobs, push_twice, with_engine
from tiny_models import save_tiny_hf
from tiny_server import running_server

from megarl.bridge.forecast import forecast
from megarl.config.schema import ParallelConfig, RolloutParallelConfig

pytestmark = [pytest.mark.server]

LATENT = {
    **{key: size for key, size in SIZES.items() if key != "head_dim"},
    # vLLM's latent attention on a CPU has keys of 512 + 64 alone.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 48,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize(
    ("tp", "parallel"),
    [(1, ParallelConfig(pp=2)), (2, ParallelConfig(tp=2, ep=2, etp=1))],
    ids=["pp2 to tp1", "tp2 ep2 to tp2"],
)
def test_a_server_has_the_new_weights(ranks, tmp_path, tp, parallel):
    folder = tmp_path / "hf"
    folder.mkdir()
    model = save_tiny_hf(folder, "deepseek_v3", tied=False, **LATENT)
    servers = RolloutParallelConfig(tp=tp)
    (tmp_path / "server").mkdir()
    with running_server(tmp_path / "server", parallel=servers, config=model.config) as server:
        results = ranks(2).run(with_engine, folder, parallel, [server.address], push_twice, False)
        check_logprobs(server.address, model, 2)
    sent = sum(result[0] for result in results)
    biases = [b for name, b in model.named_buffers() if "e_score_correction_bias" in name]
    assert sent == sum(x.nbytes for x in [*model.parameters(), *biases])
    made = forecast(model.config.to_dict(), parallel, 2, servers, itemsize=4, bucket_bytes=1 << 16)
    into_workers = results[0][2]
    assert sum(into_workers) / tp == made.optimal_into_worker
