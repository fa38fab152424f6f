"""Servers that somebody else names."""

import asyncio
import threading

import pytest

from megarl.errors import EngineError
from megarl.rollout.backends import make_client
from megarl.rollout.backends.sglang import SGLangClient
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.membership import ADDRESSES, named_servers, read_servers


def read(source):
    return asyncio.run(read_servers(str(source)))


def test_a_file_names_one_server_a_line(tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text("10.0.0.7:8000\n\n# a comment\n sglang://h:30000 # another engine\nh:1\nh:1\n")
    assert read(path) == ["10.0.0.7:8000", "sglang://h:30000", "h:1"]


def test_a_name_has_addresses():
    """This machine's own."""
    assert "127.0.0.1:8000" in read("dns://localhost:8000")


@pytest.mark.parametrize(
    "line", ["h", "h:x", "h:99999", "ftp://h:1", ":80", "http://", "[fe80::1:80"]
)
def test_what_is_no_address_is_told(tmp_path, line):
    path = tmp_path / "servers.txt"
    path.write_text(f"h:1\n{line}\n")
    with pytest.raises(EngineError, match=r"rollout.servers: .*servers.txt: .* is not"):
        read(path)


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(EngineError, match=r"rollout.servers: .*nothing.txt: .*No such file"):
        read(tmp_path / "nothing.txt")
    with pytest.raises(EngineError, match=r"rollout.servers: dns://no-such-name.invalid:1: "):
        read("dns://no-such-name.invalid:1")
    (tmp_path / "empty").write_text("")  # as seen while it is written
    with pytest.raises(EngineError, match=r"rollout.servers: .*empty names no server"):
        read(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match=r"rollout.servers: .*binary: .*decode"):
        read(tmp_path / "binary")


def test_the_servers_to_begin_with(tmp_path, monkeypatch):
    for name in ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError, match="no servers: set MEGARL_SERVER_ADDRS"):
        named_servers(None, 0.0)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "h:1, h:2,")
    assert named_servers(None, 0.0) == ["h:1", "h:2"]
    monkeypatch.setenv("MEGARL_SERVER_ADDRS", "h:3")
    assert named_servers(None, 0.0) == ["h:3"]
    path = tmp_path / "servers.txt"
    path.write_text("# none yet\n")
    with pytest.raises(EngineError, match=r"servers.txt names no server, for 0 s"):
        named_servers(str(path), 0.0)
    writer = threading.Timer(0.2, path.write_text, ["h:4\n"])
    writer.start()
    assert named_servers(str(path), 120.0) == ["h:4"]
    writer.join()


@pytest.mark.parametrize(
    ("address", "engine"),
    [("h:1", VLLMClient), ("http://h:1", VLLMClient), ("sglang://h:1", SGLangClient)],
)
def test_an_address_may_name_its_engine(address, engine):
    client = make_client("vllm", address, request_timeout_s=1.0, retries=0)
    assert type(client) is engine
    assert client.address == "http://h:1"
