"""A run whose servers somebody else starts and ends, and names in a file."""

import pytest
from tiny_server import running_server
from transformers import AutoConfig
from whole_runs import REPOSITORY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.server]

OPTIONS = [
    "total_train_steps=1000",
    "valid_dataset=null",
    "train_dataset.batch_size=8",
    "rollout.max_head_offpolicyness=0",
    "actor.mb_spec.max_tokens_per_mb=1024",
]


def test_servers_come_and_go_while_a_run_goes_on(tmp_path):
    config = AutoConfig.from_pretrained(REPOSITORY / "configs" / "quickstart_base")
    servers = tmp_path / "servers.txt"

    def serving(name):
        (tmp_path / name).mkdir()
        return running_server(tmp_path / name, config=config, max_model_len=128)

    with serving("a") as first, serving("b") as second:
        servers.write_text(f"{first.address}  # the only one\n")
        run = Run("train", *OPTIONS, f"rollout.servers={servers}", root=tmp_path / "runs")
        try:
            run.wait_for_step(lambda step: step["rollout/servers_ready"] == 1)
            servers.write_text(f"{first.address}\nvllm://{second.address[7:]}\n")
            run.wait_for_step(lambda step: step["rollout/servers_ready"] == 2)
            servers.write_text(f"{second.address}\n")
            run.wait_for_step(lambda step: step["rollout/servers_ready"] == 1)
            alone = run.steps()[-1]["step"]
            run.wait_for_step(lambda step: step["step"] > alone + 1)
        finally:
            run.process.terminate()
            run.wait()
        steps = run.steps()
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            assert step["rollout/servers_lost"] == step["rollout/rejected"] == 0
            # float32 on both sides, sums in other orders: 1e-4 nats is some 100 roundings.
            assert step["prox_behave_gap_max"] < 1e-4
        assert not [c for c in run.processes().values() if "api_server" in c]
        run.assert_nothing_is_left()
