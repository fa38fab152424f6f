"""`megarl eval` and `megarl verify` of a run whose servers are somebody else's: they have their
own, and leave those of the run alone."""

import asyncio

import pytest
from fake_server import FakeServer
from tiny_server import LoopThread

from megarl import evaluate, verify
from megarl.config.load import dump, resolve
from megarl.config.run import DatasetConfig, GRPOConfig
from megarl.config.schema import InferenceEngineConfig, PPOActorConfig
from megarl.rollout import fleet as fleet_module

WAIT_S = 120.0


class _Seen(Exception):
    """Enough was seen."""


async def asked_often(server):
    before = server.asked.count("/health")
    async with asyncio.timeout(WAIT_S):
        while server.asked.count("/health") < before + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def config(tmp_path):
    """Of a run whose servers a file names."""
    (tmp_path / "servers.txt").write_text("10.0.0.7:8000\n")
    return resolve(
        GRPOConfig(
            experiment_name="e",
            trial_name="t",
            train_dataset=DatasetConfig(path="train.jsonl"),
            valid_dataset=DatasetConfig(path="valid.jsonl"),
            actor=PPOActorConfig(path="model"),
            rollout=InferenceEngineConfig(servers=str(tmp_path / "servers.txt")),
        )
    )


def test_an_evaluation_asks_its_own_servers_only(config, tmp_path, monkeypatch):
    def head(config, addresses, run_dir):
        assert config.rollout.servers is None
        assert addresses == ["http://127.0.0.1:8001"]
        raise _Seen

    monkeypatch.setattr(evaluate, "RolloutHead", head)
    monkeypatch.setenv("MEGARL_SERVER_ADDRS", "127.0.0.1:8001")
    (tmp_path / "config.yaml").write_text(dump(config))
    with pytest.raises(_Seen):
        evaluate.main([str(tmp_path)])


def test_a_verification_keeps_its_own_servers(config, monkeypatch):
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.1)
    thread = LoopThread([])
    server = FakeServer(thread)
    try:
        own = server.address.removeprefix("http://")
        with verify._servers(config, [own]) as servers:
            servers.run(asked_often(server), WAIT_S)
            assert [client.address for client in servers.clients] == [server.address]
    finally:
        server.close()
        thread.close()
