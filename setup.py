"""Builds pyddl._C by calling CMake; everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake (configure, build) and leaves the module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        """Build ``pyddl._C``; a missing tool or a failed compilation ends in one readable sentence."""
        cmake = shutil.which("cmake")
        if cmake is None:
            raise ExecError(
                "building pyddl needs CMake >= 3.18; no `cmake` is on PATH; install it with `pip install cmake`"
            )
        try:
            import pybind11
        except ImportError:
            raise ExecError(
                "building pyddl needs pybind11; it cannot be imported; "
                "install it with `pip install pybind11`, or leave out --no-build-isolation"
            ) from None

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / f"cmake-{sysconfig.get_config_var('SOABI')}"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build_dir / 'out'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            # Given every time: with build isolation it lies in a temporary folder that the cache outlives.
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        if not (build_dir / "CMakeCache.txt").exists() or (build_dir / "build.ninja").exists():
            ninja = shutil.which("ninja")
            if ninja is not None:
                configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        self._run(configure, "a C++17 compiler (such as g++ >= 9 or clang++ >= 9) and Python's headers")
        self._run([cmake, "--build", str(build_dir), "--parallel"], "csrc/ to compile")

        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_dir / "out" / target.name, target)

    def _run(self, command: list[str], needed: str) -> None:
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ExecError(
                f"building pyddl needs {needed}; `{' '.join(command[:4])} ...` failed ({error}); "
                "CMake's own words stand above this line (with pip: add -v to see them)"
            ) from None


setup(ext_modules=[Extension("pyddl._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
