"""Every op test runs on each implementation: reference, CPU kernel, emulated CUDA, and CUDA."""

from pathlib import Path

import pytest
import torch

from megarl.ops import (  # noqa: F401 - each defines its ops
    advantages,
    build,
    fp8,
    library,
    logprob,
    logprob_loss,
    pack,
    policy_loss,
)

EMULATED = Path(__file__).parents[2] / "build" / "kernels" / "_emu.so"


@pytest.fixture(scope="session")
def declared():
    """Namespace -> its ops, for the session."""
    libraries = [library.declare_again("megarl_reference", with_references=True)]
    libraries.append(library.declare_again("megarl_emu", with_references=False))
    build.emu(EMULATED)
    library.load(EMULATED)
    return libraries


@pytest.fixture(params=["reference", "cpu", "emu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, declared):
    """Name of the implementation in use; `cuda` wants tensors on the GPU."""
    namespace = {"reference": "megarl_reference", "emu": "megarl_emu"}.get(request.param, "megarl")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param in ("cpu", "cuda"):
        assert library.sources()[request.param] == "kernel", "python -m megarl.ops.build"
    with library.ops_of(namespace):
        yield request.param


@pytest.fixture
def device(backend):
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture
def emulated(declared):
    """The CUDA kernels on a CPU, alone."""
    with library.ops_of("megarl_emu"):
        yield
