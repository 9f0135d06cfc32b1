"""The build: one list of sources, flags that keep NaN, pins for all, readable failures."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CMAKE = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")


def names(requirements):
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements}


def test_constraints_pin_every_direct_dependency_exactly():
    project = PROJECT["project"]
    wanted = names(project["dependencies"]) | names(PROJECT["build-system"]["requires"])
    wanted |= names(line for extra in project["optional-dependencies"].values() for line in extra)
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[\w-]+==[\w.]+(; python_version (<|>=) \"3\.11\")?$", line) for line in lines)
    assert names(lines) == wanted


def test_cmake_lists_every_source_once():
    listed = re.findall(r"csrc/\w+\.cpp", re.sub(r"(?m)^.*(set_source_files|set_property).*$", "", CMAKE))
    assert sorted(listed) == sorted(f"csrc/{path.name}" for path in (ROOT / "csrc").glob("*.cpp"))


def test_cmake_flags_keep_nan_and_run_on_any_processor():
    flags = re.sub(r"(?m)#.*$", "", CMAKE)
    assert "fast-math" not in flags
    assert "native" not in flags
    assert "-ffp-contract=off" in flags


def test_package_ships_its_type_hints():
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["pyddl"]
    assert (ROOT / "pyddl" / "py.typed").is_file()


def build(tmp_path, **environment):
    """Run setup.py's build_ext on a copy of the sources."""
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "pyddl").mkdir()
    command = [sys.executable, "setup.py", "build_ext", "--build-temp", "t", "--build-lib", "lib"]
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_build_without_cmake_says_what_to_install(tmp_path):
    done = build(tmp_path, PATH="/nowhere")
    assert done.returncode != 0
    assert "pip install cmake" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(shutil.which("cmake", path=SEARCH_PATH) is None, reason="needs cmake")
def test_build_without_compiler_says_what_is_needed(tmp_path):
    done = build(tmp_path, PATH=SEARCH_PATH, CXX="/nowhere/c++")
    assert done.returncode != 0
    assert "C++17 compiler" in done.stderr.splitlines()[-1]
