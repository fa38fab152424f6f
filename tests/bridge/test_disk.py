"""Files that a checkpoint loader of HF reads back bitwise, and the folders of the sender."""

import json

import pytest
import torch
from fake_server import FakeServer
from safetensors import safe_open
from tiny_server import LoopThread

from megarl.bridge.disk import DiskSender, write_safetensors
from megarl.bridge.push import Members, Pusher, Together
from megarl.errors import WeightUpdateError
from megarl.rollout.backends.vllm import VLLMClient


def some_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (100,), (3,), (6, 5), ()]
    weights = [(f"t{i}", torch.randn(s, generator=generator)) for i, s in enumerate(shapes)]
    return [*weights, ("half", torch.ones(2, dtype=torch.bfloat16)), ("t", weights[0][1].T)]


def read(folder) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = set(weight_map.values())
    assert {f.name for f in folder.iterdir()} - {index.name} == files
    tensors = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if index.is_file():
                assert all(weight_map[key] == name for key in file.keys())  # noqa: SIM118
    return tensors


@pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(1 << 20, 1), (400, 3), (1, 7)])
def test_what_is_written_is_read_back(tmp_path, max_shard_bytes, num_files):
    weights = some_weights()
    num_bytes = write_safetensors(iter(weights), tmp_path, max_shard_bytes=max_shard_bytes)
    got = read(tmp_path)
    assert got.keys() == dict(weights).keys()
    assert all(torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in weights)
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files
    assert num_bytes == sum(t.nbytes for _, t in weights)


def test_memory_of_a_tensor_may_be_used_for_the_next(tmp_path):
    shared = torch.zeros(4)
    steps = ((f"t{i}", shared.fill_(i)) for i in range(3))
    write_safetensors(steps, tmp_path, max_shard_bytes=1 << 20)
    assert [read(tmp_path)[f"t{i}"][0].item() for i in range(3)] == [0, 1, 2]


def test_nothing_to_write_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no weights"):
        write_safetensors([], tmp_path, max_shard_bytes=1)


@pytest.fixture
def server():
    loop = LoopThread([])
    fake = FakeServer(loop)
    loop.clients = [VLLMClient(fake.address, request_timeout_s=30, retries=0)]
    yield loop, fake
    fake.close()
    loop.close()


def make_pusher(loop, folder, pause):
    together, members = Together(None), Members(loop)
    sender = DiskSender(members, together, folder=folder, timeout_s=30)
    return Pusher(members, sender, together, pause=pause, timeout_s=30)


def test_only_the_newest_version_stays(server, tmp_path):
    loop, fake = server
    pusher = make_pusher(loop, tmp_path / "weights", "abort")
    for version in (4, 5, 5):  # a run that was stopped after 5 and goes on from 4
        pusher.push(some_weights(), version)
        (folder,) = (tmp_path / "weights").iterdir()
        assert folder.name == f"version_{version}"
        assert read(folder).keys() == dict(some_weights()).keys()
        assert fake.bodies[-3]["kwargs"] == {"weights_path": str(folder)}
        assert fake.bodies[-2] == {"new_version": str(version)}
    rpc = ["/collective_rpc"] * 2
    assert fake.asked == ["/pause", *rpc, "/update_weight_version", "/resume"] * 3


def test_a_server_that_cannot_read_is_named_and_the_old_version_stays(server, tmp_path):
    loop, fake = server
    pusher = make_pusher(loop, tmp_path / "weights", "keep")
    pusher.push(some_weights(), 1)
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(WeightUpdateError, match=f"load .*version_2: {fake.address}"):
        pusher.push(some_weights(), 2)
    # It may have read some of it: it serves nobody until it has a whole version.
    assert fake.asked[-2:] == ["/update_weight_version", "/health"]
    assert fake.bodies[-2] == {"new_version": "-1"}
    assert (tmp_path / "weights" / "version_1").is_dir()
