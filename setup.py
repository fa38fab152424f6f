"""Packages of megarl: `megarl/`, `launch/` installed as `megarl.launch`, and the kernels of csrc/.

Without a C++ compiler, or before torch, megarl is installed without its kernels, and says so.
"""

import logging
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# By its path: megarl itself cannot be imported before what it depends on.
_builder = runpy.run_path(str(Path(__file__).parent / "megarl" / "ops" / "build.py"))


class BuildKernels(build_ext):
    """Puts what megarl/ops/build.py builds beside it, here or in the wheel."""

    def run(self):
        package = Path(self.build_lib) / "megarl" / "ops"
        folder = Path(__file__).parent / "megarl" / "ops" if self.inplace else package
        try:
            for name, text in _builder["build"](folder).items():
                self.announce(f"megarl: {name}: {text}", level=logging.WARNING)
        except _builder["BuildError"] as error:
            raise SystemExit(f"megarl: {error}") from error

    def get_outputs(self):
        return [str(path) for path in (Path(self.build_lib) / "megarl" / "ops").glob("*.so")]

    def get_output_mapping(self):
        return {}


setup(
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.launch"],
    package_dir={"megarl": "megarl", "megarl.launch": "launch"},
    # Named so that a wheel is one of this platform; what is compiled is in build.py.
    ext_modules=[Extension("megarl.ops._kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
