"""Compiles csrc/ into the libraries beside this file. Imports neither torch nor megarl.

    _cpu.so    CPU kernels; needs a C++ compiler and the headers of an installed torch
    _cuda.so   CUDA kernels; needs nvcc and a CUDA build of torch

`pip install` calls `build`, and so does `python -m megarl.ops.build`, which is for a checkout
whose sources have changed and for environments that got torch after megarl. Two more libraries
are for tests: `emu`, the CUDA kernels under csrc/emu, and `cubins`, the CUDA kernels for every
architecture, which needs no GPU and no CUDA torch.

Environment: MEGARL_CUDA=auto|0|1 (1: an error where it cannot be built), MEGARL_CUDA_ARCHS
(default 80;90a;100a), CXX, NVCC.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
OBJECTS = ROOT / "build" / "kernels"
ARCHITECTURES = "80;90a;100a"
# The oldest torch whose stable ABI has all that csrc/binding uses: 2.10.
_STABLE_ABI = "0x020a000000000000"
_INCLUDE = [f"-I{SOURCES / 'include'}"]
_CXX_FLAGS = [
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
]
# The compiler's own checks end in a signal that csrc/emu/fibers.h takes.
EMULATOR_FLAGS = [
    *("-DMEGARL_EMU", "-O1", "-g", "-x", "c++", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"),
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
]
_NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


class BuildError(Exception):
    """What a library needs is not here, or a compiler failed."""


def build(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Build what this machine can; library -> `built`, `up to date` or why not.

    Raises:
      BuildError: a compiler that is there failed, or MEGARL_CUDA=1 cannot be done.
    """
    done = {}
    wish = os.environ.get("MEGARL_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise BuildError(f"MEGARL_CUDA must be auto, 0 or 1, got {wish!r}")
    for name, make in (("_cpu.so", cpu), ("_cuda.so", cuda)):
        if name == "_cuda.so" and wish == "0":
            done[name] = "not wanted: MEGARL_CUDA=0"
            continue
        missing = _missing(name)
        if missing and name == "_cuda.so" and wish == "1":
            raise BuildError(f"MEGARL_CUDA=1, but {missing}")
        done[name] = f"not built: {missing}" if missing else make(folder / name)
    return done


def _missing(name: str) -> str:
    """What `name` needs and is not here, in words; empty if nothing."""
    if not SOURCES.is_dir():
        return (
            f"there is no {SOURCES}; install from a checkout, after torch, with "
            "pip install --no-build-isolation"
        )
    if _torch() is None:
        return "torch is not installed; when it is, run python -m megarl.ops.build"
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()})"
    if name == "_cuda.so":
        if _cuda_of_torch() is None:
            return "torch is a CPU build"
        if _nvcc() is None:
            return "no nvcc"
    return ""


def cpu(target: Path) -> str:
    """The CPU kernels with their bindings."""
    kernels = [_cxx(path, "cpu", ["-O3"]) for path in _sources("cpu/*.cpp")]
    bindings = _bindings("cpu", "cpu", "CPU", "megarl")
    return _link(target, [*kernels, *bindings], _torch_libraries())


def cuda(target: Path) -> str:
    """The CUDA kernels with their bindings, for MEGARL_CUDA_ARCHS."""
    toolkit = _toolkit()
    defines = ["-DMEGARL_WITH_CUDA", "-DUSE_CUDA", f"-I{toolkit / 'include'}"]
    bindings = _bindings("cuda", "cuda", "CUDA", "megarl", defines)
    # Static: the toolkit's runtime need not be the version that torch has loaded.
    runtime = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    folders = [f"-L{toolkit / name}" for name in ("lib64", "lib")]  # installers, pip's nvcc
    flags = [*_torch_libraries("torch_cuda"), *folders, *runtime]
    return _link(target, [*_cubins("cuda"), *bindings], flags)


def emu(target: Path) -> str:
    """The CUDA kernels as fibers on a CPU, as torch.ops.megarl_emu."""
    kernels = [_cxx(path, "emu", EMULATOR_FLAGS) for path in _sources("cuda/*.cu")]
    bindings = _bindings("emu", "cuda", "CPU", "megarl_emu", ["-DMEGARL_EMU"])
    return _link(target, [*kernels, *bindings], _torch_libraries())


def check_cubins() -> str:
    """Compile every .cu for every architecture; a table of registers a kernel.

    Raises:
      BuildError: a kernel spills, or uses more registers than csrc/cuda/registers.json allows.
    """
    if _nvcc() is None:
        raise BuildError("no nvcc")
    objects = _cubins("check")
    _compile(objects)
    budgets = json.loads((SOURCES / "cuda" / "registers.json").read_text())
    names = [f"sm_{name}" for name in _architectures()]
    lines = [f"{'registers':<72}{'allowed':>8}" + "".join(f"{name:>9}" for name in names)]
    wrong = []
    for item in objects:
        budget = budgets.get(item.source.stem, 0)
        registers: dict[str, dict[str, int]] = {}
        for kernel, architecture, used, spilled in _ptxas(item.log.read_text()):
            registers.setdefault(kernel, {})[architecture] = used
            where = f"{item.source.name} {kernel} {architecture}"
            if spilled:
                wrong.append(f"{where}: {spilled} bytes of spills")
            if used > budget:
                wrong.append(f"{where}: {used} registers, {budget} allowed")
        for kernel, of_kernel in sorted(registers.items()):
            cells = "".join(f"{of_kernel.get(name, ''):>9}" for name in names)
            lines.append(f"{item.source.stem + ': ' + kernel:<72}{budget:>8}{cells}")
    if wrong:
        raise BuildError("; ".join(wrong))
    return "\n".join(lines)


def _ptxas(text: str) -> Iterable[tuple[str, str, int, int]]:
    """Name, architecture, registers and bytes of spills of each kernel that ptxas has told of."""
    kernel, architecture, spilled = "", "", 0
    for line in _demangled(text).splitlines():
        if found := re.search(r"Compiling entry function '(.*)' for '(\w+)'", line):
            name, architecture = found.groups()
            # The arguments, the return type and the namespaces say nothing.
            kernel = re.sub(r"\(anonymous namespace\)::|\bvoid |\w+::", "", name).split("(")[0]
            spilled = 0
        if found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(found[1]) + int(found[2])
        if found := re.search(r"Used (\d+) registers", line):
            yield kernel, architecture, int(found[1]), spilled


def _demangled(text: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return text
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- one object, one library


class _Object:
    """An object file: its command, and whether it is of the sources as they are now.

    Beside it lie `.log`, what the compiler said, and `.digest`. Files are compared by content:
    times lie where a checkout goes back, or where a source is edited while it is compiled.
    """

    def __init__(self, command: Sequence[str], source: Path, target: Path) -> None:
        self.command = [*command, "-c", str(source)]
        self.source, self.target = source, target
        self.log = target.with_suffix(".o.log")

    def digest(self) -> str:
        found = hashlib.sha256(" ".join(self.command).encode())
        torch = _torch()
        versions = [torch / "version.py"] if torch is not None else []
        for path in [*_with_headers(self.source), *versions]:
            found.update(f"\0{path}\0".encode() + path.read_bytes())
        return found.hexdigest()

    def is_old(self) -> bool:
        digest = self.target.with_suffix(".o.digest")
        if not (self.target.is_file() and self.log.is_file() and digest.is_file()):
            return True
        return digest.read_text() != self.digest()

    def make(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        digest = self.digest()  # before the compiler reads what it stands for
        partial = self.target.with_suffix(f".{os.getpid()}.o")
        said = _run([*self.command, "-o", str(partial)])
        self.log.write_text(said)
        partial.rename(self.target)
        self.target.with_suffix(".o.digest").write_text(digest)


def _with_headers(source: Path) -> list[Path]:
    """`source` and all of csrc/ that it includes, whatever the preprocessor would skip."""
    found, left = [source], [source]
    while left:
        path = left.pop()
        for name in re.findall(r'^\s*#\s*include "(.+)"', path.read_text(), re.MULTILINE):
            for folder in (path.parent, SOURCES / "include"):
                header = (folder / name).resolve()
                if header.is_file() and header not in found:
                    found.append(header)
                    left.append(header)
    return sorted(found)


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def _cxx(source: Path, folder: str, flags: Sequence[str]) -> _Object:
    command = [_compiler(), *_CXX_FLAGS, *flags, *_INCLUDE]
    return _Object(command, source, OBJECTS / folder / f"{source.stem}.o")


def _bindings(
    folder: str,
    device: str,
    key: str,
    namespace: str,
    flags: Sequence[str] = (),
) -> list[_Object]:
    torch = _torch()
    assert torch is not None, "asked before"
    defines = [
        f"-DTORCH_TARGET_VERSION={_STABLE_ABI}",
        f"-DMEGARL_DEVICE={device}",
        f"-DMEGARL_KEY={key}",
        f"-DMEGARL_NAMESPACE={namespace}",
    ]
    headers = ["-isystem", str(torch / "include")]
    command = [_compiler(), *_CXX_FLAGS, "-O2", *defines, *flags, *headers, *_INCLUDE]
    return [
        _Object(command, source, OBJECTS / folder / f"binding-{source.stem}.o")
        for source in _sources("binding/*.cpp")
    ]


def _cubins(folder: str) -> list[_Object]:
    command = [_nvcc() or "nvcc", *_NVCC_FLAGS, "-Xptxas", "-v", *_INCLUDE]
    for name in _architectures():
        command += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
    return [
        _Object(command, source, OBJECTS / folder / f"{source.stem}.o")
        for source in _sources("cuda/*.cu")
    ]


def _compile(objects: Sequence[_Object]) -> bool:
    """Make what is old; whether anything was."""
    old = [item for item in objects if item.is_old()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(_Object.make, old):
            pass
    return bool(old)


def _link(target: Path, objects: Sequence[_Object], flags: Sequence[str]) -> str:
    is_new = not _compile(objects) and target.is_file()
    command = [_compiler(), "-shared", *(str(item.target) for item in objects), *flags]
    stamp = OBJECTS / f"{target.name}.link"  # an op that is gone leaves no newer object
    newest = max(item.target.stat().st_mtime for item in objects)
    is_new = is_new and target.stat().st_mtime >= newest and stamp.is_file()
    if is_new and stamp.read_text() == " ".join(command):
        return "up to date"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    _run([*command, "-o", str(partial)])
    partial.rename(target)
    stamp.write_text(" ".join(command))
    return "built"


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


# ---------------------------------------------------------------- what is installed


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _nvcc() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc"))


def _toolkit() -> Path:
    """Folder of nvcc's include/ and lib64/; nvcc itself may be a script that calls it."""
    said = _run([_nvcc() or "nvcc", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull])
    found = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    if found is None:
        raise BuildError(f"{_nvcc()} --dryrun does not name its toolkit")
    return Path(found[1]).resolve()


def _architectures() -> list[str]:
    return os.environ.get("MEGARL_CUDA_ARCHS", ARCHITECTURES).split(";")


def _torch() -> Path | None:
    """Folder of the torch of this environment, also from within pip's isolated one."""
    folder = Path(sysconfig.get_paths()["platlib"]) / "torch"
    return folder if (folder / "include" / "torch" / "csrc" / "stable").is_dir() else None


def _torch_libraries(*more: str) -> list[str]:
    """Flags that bind to the torch that has been loaded when the library is."""
    folder = _torch()
    assert folder is not None, "asked before"
    return [f"-L{folder / 'lib'}", *(f"-l{name}" for name in ("torch_cpu", "c10", *more))]


def _cuda_of_torch() -> str | None:
    folder = _torch()
    assert folder is not None, "asked before"
    found = re.search(r"^cuda\b.*= '(.*)'", (folder / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def main(arguments: Sequence[str]) -> int:
    """`python -m megarl.ops.build [emu TARGET | cubins]`; the exit code."""
    try:
        if arguments == ["cubins"]:
            print(check_cubins())
        elif arguments[:1] == ["emu"] and len(arguments) == 2:
            print(f"{arguments[1]}: {emu(Path(arguments[1]))}")
        elif not arguments:
            for name, text in build().items():
                print(f"{name}: {text}")
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
