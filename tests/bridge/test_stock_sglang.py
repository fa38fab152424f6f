"""Buckets without gaps, and the wait for SGLang's workers. Real servers are in tests/servers."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megarl.bridge.group import listen
from megarl.bridge.stock_sglang import open_group, without_gaps
from megarl.bridge.wire import buckets

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def as_sglang_reads(bucket):
    """Tensor after tensor, each of which must begin at a multiple of its item's size."""
    start, read = 0, []
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype)
        assert start % dtype.itemsize == 0
        end = start + torch.Size(shape).numel() * dtype.itemsize
        read.append((name, bucket.buffer[start:end].view(dtype).view(shape)))
        start = end
    assert start == bucket.buffer.numel()
    return read


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.sampled_from([1, 48, 4096]),
)
def test_every_tensor_arrives_as_it_was(sizes, limit_bytes):
    weights = [
        (f"t{i}", (torch.arange(size) % 97 + i).to(dtype)) for i, (size, dtype) in enumerate(sizes)
    ]
    # A buffer is used again for the next bucket but one: what came must be read by then.
    read = []
    for bucket in without_gaps(buckets(iter(weights), limit_bytes, "cpu")):
        read += [(name, tensor.clone()) for name, tensor in as_sglang_reads(bucket)]
    assert [name for name, _ in read] == [name for name, _ in weights]
    for (_, got), (_, want) in zip(read, weights, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_nothing_is_cut_where_there_is_no_gap():
    weights = [(f"t{i}", torch.ones(8, 4 * i)) for i in range(1, 9)]
    (bucket,) = without_gaps(buckets(weights, 1 << 20, "cpu"))
    assert bucket.names == [name for name, _ in weights]


def test_the_worker_that_is_missing_is_named():
    store = listen("127.0.0.1", 30.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"weight group of 3: ranks \[1, 2\] did not join"):
        open_group(store, 3, "cpu", 0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not join"):
        open_group(store, 3, "cpu", 30.0, give_up=lambda: True)
    assert time.monotonic() - started < 20
    # Not of gloo's keys alone: of this group's.
    dist.PrefixStore("another", store).set("0/1", "here")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not join"):
        open_group(store, 3, "cpu", 0.2)
