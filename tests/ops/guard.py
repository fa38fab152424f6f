"""Tensors whose memory ends, or begins, at a page that must not be touched."""

import ctypes
import mmap

import torch

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Pages:
    """Readable pages between two that are not; given back with the object."""

    def __init__(self, num_bytes):
        self.size = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.whole = _libc.mmap(
            None, self.size + 2 * _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        assert self.whole not in (None, ctypes.c_void_p(-1).value)
        self.start = self.whole + _PAGE
        for guard in (self.whole, self.start + self.size):
            assert _libc.mprotect(guard, _PAGE, _PROT_NONE) == 0

    def __del__(self):
        _libc.munmap(self.whole, self.size + 2 * _PAGE)


def guarded(tensor, at="end"):
    """A copy with the same strides, its last byte before a guard page, or its first after one."""
    if tensor is None or tensor.numel() == 0:
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = span * tensor.element_size()
    pages = _Pages(num_bytes)
    address = pages.start + (pages.size - num_bytes if at == "end" else 0)
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    buffer.pages = pages  # lives as long as the tensor, which keeps the buffer
    flat = torch.frombuffer(buffer, dtype=tensor.dtype)
    copy = flat.as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return copy
