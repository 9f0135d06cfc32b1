"""Who may import whom (docs/architecture.md); read from the source, so a new module is covered at once."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "pyddl._C"

# room -> what it may import of pyddl, besides itself; rooms that are not named may import anything of pyddl.
# An entry that ends in "." stands for everything below it.
ROOMS = {
    "errors": set(),
    "config": {"pyddl.errors", "pyddl.core.schedule"},
    "core": {"pyddl.errors", "pyddl.config"},
    "link": {"pyddl.errors", "pyddl.config", "pyddl.core.layout", "pyddl.core.kernels"},
    "store": {"pyddl.errors", "pyddl.config", "pyddl.core."},
    "tasks": {"pyddl", "pyddl.errors", "pyddl.config", "pyddl.commands", "pyddl.store.export"},
    "view": {"pyddl", "pyddl.errors", "pyddl.config", "pyddl.core.", "pyddl.run.", "pyddl.store.", "pyddl.link."},
    "commands": {"pyddl.errors", "pyddl.config", "pyddl.run.guard", "pyddl.run.launcher"},
}
# top-level package -> the modules (or rooms, with a final ".") that may import it
OWNERS = {
    "mpi4py": ["pyddl.link.world"],
    EXTENSION: ["pyddl.core.kernels", "pyddl.link.alarm"],
    "torch": ["pyddl.run.", "pyddl.tasks."],
    "h5py": ["pyddl.store."],
}
# What the state machine, which has no clock, no randomness and no I/O, may not reach.
WORLDLY = {
    "asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip


# ---------------------------------------------------------------- reading imports


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the package by dotted name; a package stands under its own name."""
    found = {}
    for path in sorted((ROOT / "pyddl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, package: str, *, at_import_only: bool = False) -> Iterator[str]:
    """Absolute dotted names that a source imports; of ``from a import b`` both ``a`` and ``a.b``.

    Args:
        source: text of the module.
        package: dotted name of the package that it lies in.
        at_import_only: only what runs when the module is imported, not what its functions import.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                name = node.args[0].value
                level = len(name) - len(name.lstrip("."))
                parents = package.split(".")[: len(package.split(".")) - level + 1]
                yield ".".join([*parents, name[level:]]) if level else name


def as_module(name: str) -> str | None:
    """The module of pyddl of a dotted name (``pyddl.core.layout.Layout`` -> ``pyddl.core.layout``)."""
    if name == EXTENSION or name.startswith(EXTENSION + "."):
        return EXTENSION
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


@functools.cache
def dependencies(module: str, at_import_only: bool = False) -> frozenset[str]:
    """What a module imports: modules of pyddl in full, all else by its top-level name."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for name in imports_of(path.read_text(encoding="utf-8"), package, at_import_only=at_import_only):
        top = name.split(".")[0]
        names.add((as_module(name) or name) if top == "pyddl" else top)
    return frozenset(names - {module})


def closure(module: str) -> frozenset[str]:
    """All that is imported, directly or through others of pyddl, when a module is imported."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            waiting.extend(dependencies(name, at_import_only=True))
            waiting.append(name.rpartition(".")[0] or name)  # its package's __init__ runs first
    return frozenset(seen)


def is_covered(module: str, allowed: list[str] | set[str]) -> bool:
    return any(module == entry or (entry.endswith(".") and module.startswith(entry)) for entry in allowed)


# ---------------------------------------------------------------- the reader itself


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from . import layout", {"pyddl.core", "pyddl.core.layout"}),
        ("from .layout import Layout", {"pyddl.core.layout", "pyddl.core.layout.Layout"}),
        ("from .. import _C", {"pyddl", "pyddl._C"}),
        ("from ..link.world import Link", {"pyddl.link.world", "pyddl.link.world.Link"}),
        ("def f():\n    import torch", {"torch"}),
        ("class A:\n    try:\n        import torch\n    except ImportError:\n        pass", {"torch"}),
        ("import importlib\nimportlib.import_module('pyddl._C')", {"importlib", "pyddl._C"}),
        ("__import__('mpi4py')", {"mpi4py"}),
        ("import_module('..link', __package__)", {"pyddl.link"}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import math", {"math"}),
    ],
)
def test_imports_of_source_finds_every_form(source, expected) -> None:
    assert set(imports_of(source, "pyddl.core")) == expected


def test_imports_of_source_at_import_leaves_functions_out() -> None:
    source = "import math\nclass A:\n    import json\n    def f(self):\n        import torch"
    assert set(imports_of(source, "pyddl.core", at_import_only=True)) == {"math", "json"}


def test_as_module_finds_the_module_of_a_name() -> None:
    assert as_module("pyddl.core.layout.Layout") == "pyddl.core.layout"
    assert as_module("pyddl.core.layout") == "pyddl.core.layout"
    assert as_module("pyddl._C.checksum") == "pyddl._C"
    assert as_module("numpy.typing") is None


def test_modules_are_found() -> None:
    assert {"pyddl", "pyddl.core", "pyddl.core.layout", "pyddl.errors"} <= modules().keys()
    assert dependencies("pyddl.core.layout") >= {"numpy", "pyddl.errors", "pyddl.core.kernels"}
    assert "pyddl.core.kernels" not in dependencies("pyddl.core.layout", at_import_only=True)
    assert "pyddl.core.schedule" in closure("pyddl.config")


# ---------------------------------------------------------------- the rules


def room_of(module: str) -> str:
    return module.removeprefix("pyddl").removeprefix(".").split(".")[0]


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) in ROOMS])
def test_room_imports_only_what_its_rules_allow(module) -> None:
    room = room_of(module)
    own = {f"pyddl.{room}", f"pyddl.{room}."}
    packages = {name for name in modules() if modules()[name].name == "__init__.py"}
    used = {name for name in dependencies(module) if name.startswith("pyddl.") and name != EXTENSION}
    # "from ..core import layout" names the package and the module; the module is what counts.
    used = {name for name in used if not (name in packages and any(u.startswith(name + ".") for u in used))}
    wrong = {name for name in used if not is_covered(name, own | ROOMS[room])}
    assert not wrong, f"{module} may not import {sorted(wrong)}"


@pytest.mark.parametrize("module", modules())
def test_module_imports_a_package_only_where_it_is_owned(module) -> None:
    for package, owners in OWNERS.items():
        if package in dependencies(module):
            assert is_covered(module, owners), f"{module} may not import {package}; {owners} may"


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_declared_packages(module) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    declared = set(re.findall(r'^\s*"([A-Za-z0-9_-]+)', block[1], re.MULTILINE))
    assert {"numpy", "torch"} <= declared
    foreign = {n for n in dependencies(module) if n.split(".")[0] not in {"pyddl", *sys.stdlib_module_names}}
    foreign -= {"tomllib"}  # of the standard library since 3.11; before, it is tomli
    assert foreign <= declared, f"{module} imports {sorted(foreign - declared)}, which pyproject.toml does not name"


def test_protocol_reaches_neither_clock_nor_io_nor_packages() -> None:
    reached = closure("pyddl.core.protocol")
    assert "pyddl.core.schedule" in reached
    worldly = sorted(reached & WORLDLY)
    assert not worldly, f"core/protocol.py reaches {worldly}"
    foreign = sorted(n for n in reached if n.split(".")[0] not in {"pyddl", *sys.stdlib_module_names})
    assert not foreign, f"core/protocol.py reaches {foreign}"
    assert EXTENSION not in reached


@pytest.mark.parametrize(
    "module",
    [name for name in modules() if not is_covered(name, ["pyddl.run.", "pyddl.tasks.", "pyddl.link.world"])]
    + [name for name in modules() if name in ("pyddl.run.syncer", "pyddl.run.guard", "pyddl.run.launcher")],
)
def test_module_starts_without_torch(module) -> None:
    assert "torch" not in closure(module)


def test_package_alone_reaches_no_heavy_module() -> None:
    assert not closure("pyddl") & {"mpi4py", "torch", "h5py", EXTENSION}


def test_import_pyddl_loads_neither_mpi_nor_torch_nor_h5py_nor_extension() -> None:
    code = (
        "import sys, pyddl, pyddl.config, pyddl.core.layout\n"
        "print([name for name in ('mpi4py', 'torch', 'h5py', 'pyddl._C') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
