"""`bridge/engines/trace.py` on loaders of every kind; on a real vLLM in tests/servers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.bridge.engines.trace import needed_parts, parts_of, trace_loading


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


# ---------------------------------------------------------------- where parts go


class OneParameter(torch.nn.Module):
    """Whose loader copies a view of the one HF tensor into a view of itself."""

    def __init__(self, shape, target, source):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full(shape, -1.0))
        self.target, self.source = target, source

    @torch.no_grad()
    def load_weights(self, tensors):
        for _, tensor in tensors:
            self.target(self.w.data).copy_(self.source(tensor))


def slice_of(data, shape):
    """A function that takes random slices; and the shape of what it gives."""
    cuts = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    return lambda x: x[tuple(cuts)], tuple(cut.stop - cut.start for cut in cuts)


@given(st.data())
def test_what_is_written_at_destinations_is_what_the_loader_makes(data):
    """Of vectors, matrices and stacks of them: cut, transposed, one selected, seen as another."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    source, taken = slice_of(data, shape)
    kind = data.draw(st.sampled_from(["same", "into a larger", "transposed", "flat", "stacked"]))
    into, room = taken, list(taken)
    view = lambda x: source(x)  # noqa: E731
    if kind == "transposed":
        view = lambda x: source(x).transpose(0, -1)  # noqa: E731
        into = room = [*taken[::-1]] if len(taken) < 3 else [taken[2], taken[1], taken[0]]
    if kind == "flat":
        view = lambda x: source(x).reshape(-1)  # noqa: E731 - a copy where it must be
        into = room = [torch.Size(taken).numel()]
    before = [data.draw(st.integers(0, 2)) if kind == "into a larger" else 0 for _ in room]
    after = [data.draw(st.integers(0, 2)) if kind == "into a larger" else 0 for _ in room]
    room = [a + n + b for a, n, b in zip(before, room, after, strict=True)]
    index = tuple(slice(a, a + n) for a, n in zip(before, into, strict=True))
    target = lambda x: x[index]  # noqa: E731
    if kind == "stacked":
        room, target = [3, *room], lambda x: x[1]
    with torch.device("meta"):
        traced = trace_loading(OneParameter(room, target, view), [("w", list(shape), "float32")])
    owner = torch.arange(float(torch.Size(shape).numel())).view(shape)
    loaded = OneParameter(room, target, view)
    loaded.load_weights([("w", owner)])
    assert set(traced.parts) == {"w"}
    if "w" not in traced.destinations:
        assert kind == "flat"  # computed with, if flat is not a view
        return
    flat, landed = owner.view(-1, shape[-1]), OneParameter(room, target, view).w.data
    for part, parameter, offset, row_stride in traced.destinations["w"]:
        assert parameter == "w"
        a, b, c, d = part
        landed.as_strided((b - a, d - c), (row_stride, 1), offset).copy_(flat[a:b, c:d])
    assert torch.equal(landed, loaded.w.data)
    assert traced.parameters["w"].shape == tuple(room)


@pytest.mark.parametrize(
    ("source", "room", "number"),
    [
        (lambda w: w.view(-1)[2:22], [20], None),  # from within a row to within another
        (lambda w: w.view(-1)[4:20], [16], 1),
        (lambda w: w.t()[1:3], [2, 8], 2),  # a column each
        (lambda w: w[::2], [4, 4], 4),  # a row each
        (lambda w: w[2:6], [4, 4], 1),
        (lambda w: w.repeat(300, 1)[:2], [2, 4], None),  # computed
    ],
)
def test_destinations_are_few(source, room, number):
    with torch.device("meta"):
        model = OneParameter(room, lambda x: x, source)
    traced = trace_loading(model, [("w", [8, 4], "float32")])
    found = traced.destinations.get("w")
    assert (len(found) if found else None) == number


def test_a_view_in_too_many_pieces_has_no_destination():
    with torch.device("meta"):
        model = OneParameter([2, 1500], lambda x: x, lambda w: w.t())
    assert trace_loading(model, [("w", [1500, 2], "float32")]).destinations["w"]
    with torch.device("meta"):
        model = OneParameter([1500, 2], lambda x: x, lambda w: w[:, ::2])
    assert not trace_loading(model, [("w", [1500, 4], "float32")]).destinations


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        self.b.weight = self.a.weight
        self.register_buffer("lower", self.a.weight.data[3:])
        self.kept = [torch.zeros(1)]
        self.number = 3

    @torch.no_grad()
    def load_weights(self, tensors):
        for name, tensor in tensors:
            getattr(self, name).weight.copy_(tensor)


def test_names_of_one_memory():
    with torch.device("meta"):
        model = Tied()
    traced = trace_loading(model, [("b", [6, 4], "float32")])
    (destination,) = traced.destinations["b"]
    assert destination.parameter in ("lower", "a.weight")
    others = dict(traced.parameters[destination.parameter].aliases)
    start = 48 if destination.parameter == "lower" else 0
    names = {"lower": 48, "a.weight": 0, "b.weight": 0}
    assert others == {n: at - start for n, at in names.items() if n != destination.parameter}
    assert traced.tensors == {
        "": ["kept", "lower"],
        "a": ["bias", "weight"],
        "b": ["bias", "weight"],
    }


def test_the_last_of_two_tensors_for_one_place():
    """The first is written over: it cannot land in any order."""
    with torch.device("meta"):
        model = Tied()
    traced = trace_loading(model, [(name, [6, 4], "float32") for name in ("a", "b")])
    assert set(traced.parts) == {"a", "b"}
    assert set(traced.destinations) == {"b"}
