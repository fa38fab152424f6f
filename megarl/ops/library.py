"""The kernels of csrc/ as torch ops, and which of them this process has.

Every op is declared here once, with a torch reference as its default. Where _cpu.so or _cuda.so
has been built, torch's dispatcher takes the kernel of the tensors' device instead. So there is
one dispatch, torch's own, and it is settled when this module is imported:

    op("logprob_stats")(logits, ...)    CUDA tensors: csrc/cuda, else the reference
                                        CPU tensors: csrc/cpu, else the reference

MEGARL_KERNELS=reference leaves the libraries alone.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_NAMESPACE = "megarl"
_library = torch.library.Library(_NAMESPACE, "DEF")
_defined: list[tuple[str, Callable[..., None]]] = []
_used = {"namespace": _NAMESPACE}

Source = Literal["kernel", "reference"]


def define(schema: str, reference: Callable[..., None]) -> None:
    """Declare an op, with the function that stands in where there is no kernel.

    Args:
      schema: `name(Tensor x, Tensor(a!) out) -> ()`; results go into tensors of the caller.
      reference: takes what the schema says, on any device.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    # Nothing is returned and all outputs are given: there is no shape to infer.
    torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *args: None, lib=_library)
    _defined.append((schema, reference))


def op(name: str) -> Callable[..., None]:
    """The op of a schema that was defined."""
    found: Callable[..., None] = getattr(getattr(torch.ops, _used["namespace"]), name)
    return found


def load(path: Path) -> None:
    """Make the kernels of a library those of their device.

    Raises:
      ImportError: it does not load.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} does not load ({error}); python -m megarl.ops.build makes it anew, and "
            "MEGARL_KERNELS=reference does without"
        ) from error


def declare_again(namespace: str, *, with_references: bool) -> torch.library.Library:
    """For tests: every op once more as torch.ops.NAMESPACE, for as long as the result lives.

    Args:
      with_references: as its default; otherwise a library that is loaded has its kernels.
    """
    library = torch.library.Library(namespace, "DEF")
    for schema, reference in _defined:
        library.define(schema)
        if with_references:
            library.impl(schema.partition("(")[0], reference, "CompositeExplicitAutograd")
    return library


def sources() -> dict[str, Source]:
    """Device type -> what its ops are, in this process."""
    return dict(_sources)


def _load_all() -> dict[str, Source]:
    found: dict[str, Source] = {"cpu": "reference", "cuda": "reference"}
    if os.environ.get("MEGARL_KERNELS") == "reference":
        return found
    for device, is_usable in (("cpu", True), ("cuda", torch.version.cuda is not None)):
        path = _FOLDER / f"_{device}.so"
        if is_usable and path.is_file():
            load(path)
            found[device] = "kernel"
    return found


def log_source(device: torch.device) -> None:
    """Say once a run what its ops are."""
    source = _sources[device.type]
    if source == "kernel":
        logger.info("kernels: %s", _FOLDER / f"_{device.type}.so")
    else:
        logger.warning(
            "kernels: none for %s, its torch reference is used; python -m megarl.ops.build "
            "builds them",
            device.type,
        )


_sources: dict[str, Source] = {}
_sources.update(_load_all())


@contextlib.contextmanager
def ops_of(namespace: str) -> Iterator[None]:
    """For tests: `op` gives those of another namespace."""
    before, _used["namespace"] = _used["namespace"], namespace
    try:
        yield
    finally:
        _used["namespace"] = before
