"""Stands in for SGLang's compiled kernels, which have no wheel for a CPU. Computes nothing.

SGLang 0.5.23 imports names from `sgl_kernel` on every platform ("No module named 'sgl_kernel'").
Without the ops that its build registers, it takes its plain torch paths on a CPU; what it should
still call of this module is an error that names it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's kernels are not built here")

    return missing
