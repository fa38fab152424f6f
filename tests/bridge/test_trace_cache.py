"""`bridge/engines/trace_cache.py`: what is read is what was traced, or it is traced again."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from test_landing import SHAPES, Engine

from megarl.bridge.engines import trace_cache
from megarl.bridge.engines.trace import trace_loading
from megarl.bridge.engines.trace_cache import TraceKey, cached_trace

KEY = TraceKey(
    engine="sglang",
    engine_version="0.5.23",
    hf_config={"model_type": "qwen3", "rope": {"theta": 1e6}},
    dtype="bfloat16",
    tp=2,
    pp=1,
    ep=1,
    rank=1,
    tensors=[("w", [4, 8], "bfloat16")],
    options={"quantisation": None},
)
OTHERS = {
    "engine": "vllm",
    "engine_version": "0.5.24",
    "hf_config": {"model_type": "qwen3", "rope": {"theta": 2e6}},
    "dtype": "float32",
    "tp": 1,
    "pp": 2,
    "ep": 2,
    "rank": 0,
    "tensors": [("w", [8, 4], "bfloat16")],
    "options": {"quantisation": "fp8"},
}


class Maker:
    """Traces, and counts how often."""

    def __init__(self, rank=1):
        self.calls, self.rank = 0, rank

    def __call__(self):
        self.calls += 1
        with torch.device("meta"):
            model = Engine(self.rank)
        return trace_loading(model, [(n, s, "bfloat16") for n, s in SHAPES.items()])


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_trace_is_made_once(tmp_path):
    make = Maker()
    traced = make()
    assert len(traced.parts) == len(SHAPES)
    assert traced.parameters["embed.weight"].aliases == (("head.weight", 0),)
    for _ in range(3):
        assert cached_trace(KEY, make, tmp_path) == traced
    assert make.calls == 2  # ours, and one
    assert only_file(tmp_path).suffix == ".json"


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached_trace(KEY, Maker())
    assert only_file(tmp_path / "cache" / "megarl" / "traces").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cached_trace(KEY, Maker())
    assert only_file(tmp_path / "home" / ".cache" / "megarl" / "traces").is_file()


@pytest.mark.parametrize("name", [f.name for f in fields(TraceKey)])
def test_everything_in_the_key_counts(tmp_path, name):
    make = Maker()
    cached_trace(KEY, make, tmp_path)
    cached_trace(replace(KEY, **{name: OTHERS[name]}), make, tmp_path)
    assert make.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_the_order_of_a_config_does_not_count():
    config = {"rope": {"theta": 1e6}, "model_type": "qwen3"}
    assert replace(KEY, hf_config=config).digest() == KEY.digest()


def test_the_tracing_code_counts(tmp_path, monkeypatch):
    before = KEY.digest()
    changed = tmp_path / "trace.py"
    changed.write_text("changed")
    monkeypatch.setattr(trace_cache.trace_module, "__file__", str(changed))
    assert KEY.digest() != before


@pytest.mark.parametrize("damage", ["bit", "half", "empty", "other trace"])
def test_a_damaged_file_is_traced_again(tmp_path, caplog, damage):
    make = Maker()
    traced = cached_trace(KEY, make, tmp_path)
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"16", 100)
    data[at] = ord("3")  # still JSON, another trace
    changed = {"bit": data, "half": data[: len(data) // 2], "empty": b"", "other trace": data[70:]}
    path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert cached_trace(KEY, make, tmp_path) == traced
    assert make.calls == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path} is damaged: the loader is traced again"
    ]
    assert cached_trace(KEY, make, tmp_path) == traced
    assert make.calls == 2


def test_several_servers_write_at_once(tmp_path, monkeypatch, caplog):
    """All of one machine start together: each reads a whole file or none."""
    replaces = []

    def counted(source, target, real=os.replace):
        replaces.append(source)
        real(source, target)

    monkeypatch.setattr(trace_cache.os, "replace", counted)
    makers = [Maker() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda m: [cached_trace(KEY, m, tmp_path) for _ in range(5)], makers))
    want = Maker()()
    assert all(trace == want for traces in found for trace in traces)
    assert len(set(replaces)) == len(replaces) == sum(m.calls for m in makers)
    assert only_file(tmp_path).name == f"{KEY.digest()}.json"
    assert caplog.records == []


def test_a_write_that_fails_leaves_nothing_and_no_error(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_cache.os, "replace", full)
    make = Maker()
    assert cached_trace(KEY, make, tmp_path) == make()
    assert list(tmp_path.iterdir()) == []
    assert "cannot be written ([Errno 28] No space left on device)" in caplog.text
    (tmp_path / "file").write_text("")
    cached_trace(KEY, make, tmp_path / "file" / "folder")  # no folder can be there
    assert "Not a directory" in caplog.text
