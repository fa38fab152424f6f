"""Packing is a bitwise copy, within its limits, for any list of tensors."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.bridge import wire
from megarl.bridge.wire import buckets, digest, digest_on_device, message_bytes, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


@settings(deadline=None)
@given(st.lists(tensors(), max_size=12), st.integers(1, 400))
def test_every_tensor_arrives_in_order(given_tensors, limit_bytes):
    weights = [(f"t{i}", tensor) for i, tensor in enumerate(given_tensors)]
    arrived = []
    for bucket in buckets(iter(weights), limit_bytes, "cpu"):
        assert bucket.names
        assert bucket.buffer.dtype == torch.uint8
        assert bucket.buffer.numel() == message_bytes(bucket.dtypes, bucket.shapes)
        assert bucket.buffer.numel() <= limit_bytes or len(bucket.names) == 1
        sent = bucket.buffer.clone()  # as a receiver has it
        arrived += unpack(sent, bucket.names, bucket.dtypes, bucket.shapes)
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, got), (_, want) in zip(arrived, weights, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_messages_are_as_full_as_the_limit_allows():
    weights = [(f"t{i}", torch.ones(4)) for i in range(5)]  # 16 bytes each
    assert [len(b.names) for b in buckets(weights, 32, "cpu")] == [2, 2, 1]
    assert [len(b.names) for b in buckets(weights, 31, "cpu")] == [1] * 5


def test_the_next_message_can_be_packed_while_one_is_sent():
    weights = ((f"t{i}", torch.full((4,), float(i))) for i in range(6))
    stream = buckets(weights, 16, "cpu")
    buffers = [next(stream).buffer for _ in range(3)]
    assert buffers[0].data_ptr() == buffers[2].data_ptr()  # two buffers for any number
    assert buffers[1].view(torch.float32).tolist() == [1.0] * 4  # untouched by the packing of 2


def test_weights_are_taken_only_as_they_are_sent():
    taken = []

    def weights():
        for i in range(10):
            taken.append(i)
            yield f"t{i}", torch.ones(4)

    stream = buckets(weights(), 32, "cpu")
    next(stream)
    assert taken == [0, 1, 2]  # the third is what did not fit


def test_a_name_that_comes_twice_is_an_error():
    with pytest.raises(ValueError, match="t0 comes twice"):
        list(buckets([("t0", torch.ones(1)), ("t0", torch.ones(1))], 64, "cpu"))


def test_a_buffer_of_another_size_is_an_error():
    with pytest.raises(ValueError, match="32 bytes in 16"):
        list(unpack(torch.zeros(16, dtype=torch.uint8), ["t"], ["float32"], [[8]]))


def test_an_unknown_dtype_is_an_error():
    with pytest.raises(ValueError, match="'nn' is no dtype"):
        message_bytes(["nn"], [[1]])


def test_a_digest_depends_on_every_byte_and_its_place():
    x = torch.arange(1, 1001, dtype=torch.float32)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x.flip(0))
    changed = x.clone()
    changed[617] = torch.nextafter(changed[617], torch.tensor(1e9))
    assert digest(x) != digest(changed)
    odd = torch.arange(7, dtype=torch.bfloat16)
    assert digest(odd) == digest(torch.cat([odd, torch.zeros(1, dtype=torch.bfloat16)]))
    assert digest(odd[:6]) != digest(odd)
    assert digest(torch.empty(0)) == 0
    assert 0 <= digest(-x) < 1 << 64


def plain_digest(data):
    """By the definition, in integers without a limit."""
    data += bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(data) // 4}i", data)
    return sum(place * word for place, word in enumerate(words, 1)) % (1 << 64)


@given(st.binary(max_size=200), st.integers(0, 5), st.sampled_from([4, 16, 64, 1 << 20]))
def test_a_digest_is_its_formula_however_it_is_chunked(data, start, chunk_bytes):
    tensor = torch.tensor(list(bytes(start) + data), dtype=torch.uint8)[start:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_CHUNK_BYTES", chunk_bytes)
        patch.setattr(wire, "_DEVICE_CHUNK_BYTES", chunk_bytes)
        assert digest(tensor) == plain_digest(data)
        on_device = digest_on_device(tensor)
    assert (on_device.dtype, on_device.shape) == (torch.int64, ())
    assert int(on_device) % (1 << 64) == plain_digest(data)


def test_a_digest_of_large_words_wraps():
    words = torch.full((1 << 19,), -(1 << 31), dtype=torch.int32)
    n = words.numel()
    assert digest(words) == (-(1 << 31) * (n * (n + 1) // 2)) % (1 << 64)
