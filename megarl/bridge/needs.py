"""What workers need, as it travels from them to the trainer. Imports no torch.

Most tensors of a model are taken in one of a few ways, so an answer says each way once, with
the tensors that are taken so: for DeepSeek-V3's 91,000 tensors half a megabyte a worker instead
of six. Workers at the same place of two servers answer the same, and are planned as one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.bridge.boxes import Box

Part = tuple[int, int, int, int]
Needs = dict[str, list[Box]]
"""HF name -> boxes that a worker's loader takes of it."""


def encode(parts: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str]) -> list[Any]:
    """`[[parts, [index in names, ...]], ...]`, plain lists."""
    index = {name: i for i, name in enumerate(names)}
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for name, of_tensor in parts.items():
        found.setdefault(tuple(tuple(p) for p in of_tensor), []).append(index[name])
    return [[[list(p) for p in key], indices] for key, indices in found.items()]


def decode(answer: Sequence[Any], names: Sequence[str]) -> Needs:
    """What was encoded; boxes of one pattern are one list."""
    needs = {}
    for parts, indices in answer:
        boxes = [Box(*part) for part in parts]
        needs.update((names[i], boxes) for i in indices)
    return needs
