"""`bridge/engines/trace.py` on loaders of every kind; on a real vLLM in tests/servers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.bridge.engines.trace import needed_parts, parts_of


def parts_after(read, shape):
    """What a loader that calls `read` on its one tensor needs."""

    def load(tensors):
        for _, tensor in tensors:
            read(tensor)

    return needed_parts(load, [("w", list(shape), "float32")]).get("w")


def copy(view):
    torch.empty(view.shape, device="meta").copy_(view)


@pytest.mark.parametrize(
    ("read", "shape", "parts"),
    [
        (copy, (6, 4), [(0, 6, 0, 4)]),
        (lambda w: copy(w[2:4]), (6, 4), [(2, 4, 0, 4)]),
        (lambda w: copy(w.narrow(1, 1, 2)), (6, 4), [(0, 6, 1, 3)]),
        (lambda w: copy(w.t()[1:3]), (6, 4), [(0, 6, 1, 3)]),
        (lambda w: copy(w[3]), (6, 4), [(3, 4, 0, 4)]),
        (lambda w: copy(w[2:5]), (9,), [(0, 1, 2, 5)]),
        (lambda w: copy(w.view(2, 3, 4)[1]), (6, 4), [(3, 6, 0, 4)]),
        (lambda w: copy(w.view(2, 3, 4)[:, :1]), (6, 4), [(0, 1, 0, 4), (3, 4, 0, 4)]),
        (lambda w: copy(w[1, :, 2:]), (3, 5, 4), [(5, 10, 2, 4)]),
        (lambda w: [copy(w[:2]), copy(w[4:])], (6, 4), [(0, 2, 0, 4), (4, 6, 0, 4)]),
        (lambda w: [copy(w[:2]), copy(w)], (6, 4), [(0, 6, 0, 4)]),
        (lambda w: [copy(w[:3]), copy(w[2:, :2])], (6, 4), [(0, 6, 0, 4)]),
        # Computed of a part: that part is needed, whatever becomes of it.
        (lambda w: copy(w[2:4].to(torch.bfloat16).float()), (6, 4), [(2, 4, 0, 4)]),
        (lambda w: copy(torch.cat([w[:1], w[5:]])), (6, 4), [(0, 1, 0, 4), (5, 6, 0, 4)]),
        (
            lambda w: copy(w[::3, ::3]),
            (4, 4),
            [(r, r + 1, c, c + 1) for r in (0, 3) for c in (0, 3)],
        ),
        (lambda w: copy(w[:, ::2]), (600, 4), [(0, 600, 0, 4)]),  # too many boxes: all of it
        (lambda w: copy(w[:1].expand(3, 4)), (6, 4), [(0, 1, 0, 4)]),
        (lambda w: copy(w.reshape(())), (), [(0, 1, 0, 1)]),
        (lambda w: w.view(-1), (6, 4), None),  # a view alone reads nothing
        (lambda w: None, (6, 4), None),
    ],
)
def test_what_is_read_is_what_is_needed(read, shape, parts):
    assert parts_after(read, shape) == parts


@given(st.data())
def test_parts_are_the_elements_of_the_view(data):
    """Random slices, transpositions and views: exactly the elements, or a superset that is all."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    owner = torch.arange(torch.Size(shape).numel()).view(shape)
    view = owner
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, view.ndim - 1))
        kind = data.draw(st.sampled_from(["narrow", "transpose", "step", "select"]))
        if kind == "narrow":
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "transpose":
            view = view.transpose(dim, view.ndim - 1)
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        elif view.ndim > 1:
            view = view.select(dim, data.draw(st.integers(0, view.shape[dim] - 1)))
    flat = owner.view(-1, owner.shape[-1])
    parts = parts_of(view, owner)
    covered = [flat[a:b, c:d].flatten() for a, b, c, d in parts]
    got = sorted(torch.cat(covered).tolist())
    want = sorted(set(view.flatten().tolist()))
    assert got == want or got == sorted(owner.flatten().tolist())
    if view.is_contiguous() and view.shape[1:] == owner.shape[1:]:
        assert got == want  # rows are never sent whole for want of a better word
