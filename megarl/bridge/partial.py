"""A tensor of which only one run of elements is in memory.

An engine's loader takes HF tensors of the whole shape and narrows them to its own part. For an
embedding [129280, 7168] in bfloat16 the whole is 1.85 GB, of which a worker of eight reads an
eighth. This stands for the whole, and has memory for what is read. Imports torch only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class PartialTensor(Tensor):
    """A contiguous tensor whose elements from `first` on are `data`, and whose others are nowhere.

    Views of it are of its kind. Any other op is given the memory behind the view; if an element
    of it is not there, that is an error, never another value.
    """

    _place: Tensor
    """On the meta device: shape, strides and offset in the whole tensor."""
    _data: Tensor
    """[n], contiguous."""
    _first_byte: int
    """Of the whole tensor, that `_data` begins with."""

    @staticmethod
    def make(shape: list[int] | tuple[int, ...], first: int, data: Tensor) -> "PartialTensor":
        """A tensor of `shape` and of data's dtype, of which `data` [n] is from `first` on."""
        place = torch.empty(shape, dtype=data.dtype, device="meta")
        return _wrap(place, data, first * data.itemsize)

    @staticmethod
    def __new__(cls, place: Tensor, device: torch.device) -> "PartialTensor":
        made: PartialTensor = Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=place.dtype,
            device=device,
        )
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode `contiguous` and `to` come here whole: they are a view or a copy.
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        source = args[0] if args else None
        if isinstance(source, PartialTensor) and _is_view(func):
            place = func(source._place, *args[1:], **kwargs)
            # A view is an inference tensor if and only if what it is of is one.
            with torch.inference_mode(source.is_inference()):
                return tree_map_only(
                    Tensor, lambda p: _wrap(p, source._data, source._first_byte), place
                )
        args, kwargs = tree_map_only(PartialTensor, PartialTensor.in_memory, (args, kwargs))
        return func(*args, **kwargs)

    def in_memory(self) -> Tensor:
        """The same elements as a plain tensor, a view of what is there.

        Raises:
          ValueError: an element is not there.
        """
        place, data = self._place, self._data.view(self._place.dtype)
        steps = zip(place.shape, place.stride(), strict=True)
        first = place.storage_offset() - self._first_byte // place.itemsize
        last = first + sum((size - 1) * stride for size, stride in steps)
        if place.numel() and not 0 <= first <= last < data.numel():
            raise ValueError(
                f"elements {first} to {last} of a tensor of which {data.numel()} are there: the "
                f"loader reads another part than it did when it was traced"
            )
        return data.as_strided(place.shape, place.stride(), data.storage_offset() + max(first, 0))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PartialTensor({tuple(self.shape)}, {self.dtype}, {self._data.numel()} there)"


def _wrap(place: Tensor, data: Tensor, first_byte: int) -> PartialTensor:
    made = PartialTensor(place, data.device)
    made._place, made._data, made._first_byte = place, data, first_byte
    return made


def _is_view(func: Any) -> bool:
    """Whether the result is other elements of the same memory, nothing read nor written."""
    infos = [x.alias_info for x in (*func._schema.arguments, *func._schema.returns)]
    found = [info for info in infos if info is not None]
    return bool(found) and not any(info.is_write for info in found)
