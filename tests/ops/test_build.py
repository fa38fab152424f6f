"""`ops/build.py`, `setup.py` and what `ops/library.py` does with what they made.

Not covered: a CUDA build of torch, which is what `benchmarks/kernels.py` begins with on a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megarl.ops import build

ROOT = Path(__file__).parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, not a GPU")


def python(code, **environment):
    """What another process prints; its errors with it."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    return result.stdout + result.stderr


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """csrc/ of its own, with two small sources and one header."""
    sources = tmp_path / "csrc"
    for folder in ("cpu", "cuda", "binding", "include/megarl"):
        (sources / folder).mkdir(parents=True)
    (sources / "include" / "megarl" / "one.h").write_text("#pragma once\nint one();\n")
    (sources / "include" / "megarl" / "deep.h").write_text('#include "megarl/one.h"\n')
    (sources / "cpu" / "one.cpp").write_text('#include "megarl/deep.h"\nint one() { return 1; }\n')
    (sources / "cpu" / "two.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "objects")
    monkeypatch.setattr(build, "_INCLUDE", [f"-I{sources / 'include'}"])
    return tmp_path


# ---------------------------------------------------------------- what is missing


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("MEGARL_CUDA", "auto")
    done = build.build(tmp_path)
    assert done["_cpu.so"] == "not built: no C++ compiler (/nonexistent/c++)"
    assert "not built" in done["_cuda.so"]
    assert not list(tmp_path.iterdir())


def test_without_torch_it_says_when_to_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_torch", lambda: None)
    assert "when it is, run python -m megarl.ops.build" in build.build(tmp_path)["_cpu.so"]


def test_without_sources_it_says_where_to_install_from(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert "install from a checkout" in build.build(tmp_path)["_cpu.so"]


@pytest.mark.parametrize(
    ("cuda_of_torch", "nvcc", "message"),
    [
        (None, "/usr/bin/nvcc", "MEGARL_CUDA=1, but torch is a CPU build"),
        ("13.0", None, "MEGARL_CUDA=1, but no nvcc"),
    ],
)
def test_cuda_that_is_asked_for_and_cannot_be(checkout, monkeypatch, cuda_of_torch, nvcc, message):
    monkeypatch.setenv("MEGARL_CUDA", "1")
    monkeypatch.setattr(build, "_cuda_of_torch", lambda: cuda_of_torch)
    monkeypatch.setattr(build, "_nvcc", lambda: nvcc)
    with pytest.raises(build.BuildError, match=message):
        build.build(checkout / "out")


def test_cuda_can_be_left_out(checkout, monkeypatch):
    monkeypatch.setenv("MEGARL_CUDA", "0")
    done = build.build(checkout / "out")
    assert done == {"_cpu.so": "built", "_cuda.so": "not wanted: MEGARL_CUDA=0"}


def test_another_value_is_an_error(checkout, monkeypatch):
    monkeypatch.setenv("MEGARL_CUDA", "yes")
    with pytest.raises(build.BuildError, match="MEGARL_CUDA must be auto, 0 or 1, got 'yes'"):
        build.build(checkout / "out")


def test_an_error_of_the_compiler_is_shown(checkout, monkeypatch):
    monkeypatch.setenv("MEGARL_CUDA", "0")
    (checkout / "csrc" / "cpu" / "two.cpp").write_text("int two() { return nothing; }\n")
    with pytest.raises(build.BuildError, match=r"(?s)two\.cpp.*nothing.*not declared"):
        build.build(checkout / "out")
    assert not (checkout / "out").exists()


# ---------------------------------------------------------------- what is made anew


def objects_of(checkout):
    """Object -> when it was made, after a build."""
    said = build.cpu(checkout / "out" / "_cpu.so")
    made = {path.name: path.stat().st_mtime_ns for path in (checkout / "objects").rglob("*.o")}
    return said, made


def changed(before, after):
    return {name for name in after if after[name] != before.get(name)}


def test_nothing_is_made_twice(checkout):
    said, before = objects_of(checkout)
    assert said == "built"
    assert set(before) == {"one.o", "two.o"}
    for path in (checkout / "csrc").rglob("*.*"):
        os.utime(path)  # as a checkout that goes back and forth does
    said, after = objects_of(checkout)
    assert (said, after) == ("up to date", before)


@pytest.mark.parametrize(
    ("path", "text", "rebuilt"),
    [
        ("cpu/two.cpp", "int two() { return 3; }\n", {"two.o"}),
        ("include/megarl/one.h", "#pragma once\nint one();\nint more();\n", {"one.o"}),
    ],
)
def test_a_change_makes_what_depends_on_it(checkout, path, text, rebuilt):
    _, before = objects_of(checkout)
    (checkout / "csrc" / path).write_text(text)
    os.utime(checkout / "csrc" / path, (0, 0))  # older than the object, and yet other
    said, after = objects_of(checkout)
    assert said == "built"
    assert changed(before, after) == rebuilt


def test_another_command_makes_all(checkout, monkeypatch):
    _, before = objects_of(checkout)
    monkeypatch.setattr(build, "_CXX_FLAGS", [*build._CXX_FLAGS, "-DOTHER"])
    said, after = objects_of(checkout)
    assert said == "built"
    assert changed(before, after) == {"one.o", "two.o"}


def test_a_source_that_is_gone_leaves_the_library(checkout):
    objects_of(checkout)
    assert b"two" in (checkout / "out" / "_cpu.so").read_bytes()
    (checkout / "csrc" / "cpu" / "two.cpp").unlink()
    said, _ = objects_of(checkout)
    assert said == "built"
    assert b"two.cpp" not in (checkout / "out" / "_cpu.so").read_bytes()


def test_an_object_cut_short_is_made_again(checkout):
    _, before = objects_of(checkout)
    (checkout / "objects" / "cpu" / "two.o.digest").unlink()  # written last
    said, after = objects_of(checkout)
    assert said == "built"
    assert changed(before, after) == {"two.o"}


# ---------------------------------------------------------------- what is loaded


SOURCES_OF = "from megarl.ops import library; print(library.sources()['cpu'])"


def test_the_library_is_used_where_it_is():
    assert python(SOURCES_OF).strip() == "kernel"
    assert python(SOURCES_OF, MEGARL_KERNELS="reference").strip() == "reference"


def test_a_library_that_does_not_load_is_an_error_with_its_remedy(tmp_path):
    broken = tmp_path / "_cpu.so"
    broken.write_bytes(b"\x7fELF, and no more of it")
    said = python(
        "from pathlib import Path; from megarl.ops import library; "
        f"library._FOLDER = Path({str(tmp_path)!r}); library._load_all()"
    )
    assert f"ImportError: {broken} does not load" in said
    assert "python -m megarl.ops.build makes it anew" in said
    assert "MEGARL_KERNELS=reference does without" in said


def test_a_wheel_has_the_library(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, "MEGARL_CUDA": "0"})
    (wheel,) = tmp_path.glob("*.whl")
    assert "linux" in wheel.name  # not a wheel for every machine
    names = zipfile.ZipFile(wheel).namelist()
    assert "megarl/ops/_cpu.so" in names
    assert "megarl/launch/__init__.py" in names


# ---------------------------------------------------------------- registers


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """csrc/cuda of its own with one kernel, for one architecture."""
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES / "include", sources / "include")
    (sources / "cuda").mkdir()
    (sources / "cuda" / "small.cu").write_text(
        "__global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }\n"
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "objects")
    monkeypatch.setenv("MEGARL_CUDA_ARCHS", "90a")

    def budget(**registers):
        (sources / "cuda" / "registers.json").write_text(json.dumps(registers))
        return sources / "cuda"

    return budget


@needs_nvcc
def test_every_kernel_is_within_its_registers():
    table = build.check_cubins()
    for path in (ROOT / "csrc" / "cuda").glob("*.cu"):
        assert ("__global__" in path.read_text()) == (f"\n{path.stem}: " in table)


@needs_nvcc
def test_a_kernel_over_its_registers_is_an_error(cubins):
    cubins(small=32)
    assert "\nsmall: twice " in build.check_cubins()
    cubins(small=4)
    with pytest.raises(build.BuildError, match=r"small\.cu twice sm_90a: \d+ registers, 4 allowed"):
        build.check_cubins()
    cubins()
    with pytest.raises(build.BuildError, match=r"small\.cu twice sm_90a: \d+ registers, 0 allowed"):
        build.check_cubins()


@needs_nvcc
def test_a_kernel_that_spills_is_an_error(cubins):
    """64 values alive at once in 32 registers."""
    (cubins(small=255) / "small.cu").write_text(
        "__global__ void __launch_bounds__(1024, 2) many(float* x) {\n"
        "  float f[64];\n"
        "  for (int i = 0; i < 64; ++i) f[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * i] = f[63 - i] * f[i];\n"
        "}\n"
    )
    with pytest.raises(build.BuildError, match=r"small\.cu many sm_90a: \d+ bytes of spills"):
        build.check_cubins()
