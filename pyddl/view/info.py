"""``pyddl info``: what is installed, what MPI survives here, and what a run would need.

Here: versions and the plan of sizes, as tables. Not here: starting MPI (a login node may not have it).
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys

from rich.console import Console
from rich.table import Table

from ..config import Config
from ..core import kernels
from ..core.rounds import ProtocolConfig
from ..link.mailbox import WIRE_BYTES
from ..run import launcher

__all__ = ["plan", "show_plan", "show_versions"]


def show_versions() -> None:
    """Print versions, launcher, kernels."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _versions().items():
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)


def _versions() -> dict[str, str]:
    rows = {"python": f"{platform.python_version()} ({sys.executable})"}
    for package in ("pyddl", "torch", "numpy", "mpi4py", "h5py", "mpich", "openmpi"):
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            rows[package] = "not installed"
    found = launcher.detect(os.environ)
    rows["launcher"] = found.name if found.num_tasks is None else f"{found.name}, {found.num_tasks} tasks"
    survives = {True: "yes", False: "no", None: "not known"}[found.survives]
    rows["a rank's death is survived"] = f"{survives}. {found.advice}".rstrip(". ") + "."
    rows["MPI library"] = _mpi_library()
    for backend, state in kernels.describe_backends().items():
        rows[f"kernels: {backend}"] = state
    rows["kernels: cuda"] = "not built in this version"
    return rows


def _mpi_library() -> str:
    """The MPI that mpi4py loads, without MPI_Init (which may fail or hang outside a launcher)."""
    try:
        from ..link import world
    except (ImportError, RuntimeError) as error:
        return f"cannot be loaded: {error}. Install one, such as pip install 'pyddl[mpich]'"
    return world.mpi_version()


def plan(config: Config, num_parameters: int, num_learners: int, step_s: float) -> dict[str, float]:
    """Sizes of a run in bytes and bytes per second (docs/architecture.md, Sizes).

    Args:
        config: of the run.
        num_parameters: of the model, all trained, float32.
        num_learners: M.
        step_s: duration of an inner step, seconds.
    """
    num_fragments = config.sync.num_fragments or 24
    fragment = math.ceil(num_parameters / num_fragments)
    interval = config.interval.shortest_steps
    slots = ProtocolConfig(
        num_fragments=num_fragments,
        num_learners=num_learners,
        interval=config.interval,
        tau_steps=config.sync.tau_steps,
        in_flight=config.sync.in_flight,
    ).max_in_flight
    wire = fragment * WIRE_BYTES[config.sync.wire]
    copies = 1 + (config.outer.optimizer == "nesterov") + (0.5 if config.sync.wire == "bf16" else 0)
    rate = num_fragments / (interval * step_s)  # fragments per second, each way
    return {
        "fragment_bytes": wire,
        "mailbox_bytes": 2 * slots * wire * num_learners,
        "state_bytes": num_parameters * 4 * copies + slots * fragment * 4 * copies,
        "learner_bytes": num_parameters * 4 + (slots + 2) * fragment * 4,
        "learner_bytes_per_s": rate * wire,
        "syncer_bytes_per_s": rate * wire * num_learners,
        "checkpoint_bytes": num_parameters * 4 * (1 + (config.outer.optimizer == "nesterov")),
    }


def show_plan(config: Config, num_parameters: int, num_learners: int, step_s: float) -> None:
    """Print the plan of sizes."""
    sizes = plan(config, num_parameters, num_learners, step_s)
    table = Table(title=f"{num_parameters:,} parameters, {num_learners} learners, {step_s:g} s a step", box=None)
    table.add_column("what")
    table.add_column("size", justify="right")
    for label, key, unit in (
        ("one fragment on the wire", "fragment_bytes", "GB"),
        ("mailboxes on the syncer's host", "mailbox_bytes", "GB"),
        ("global model on the syncer's host", "state_bytes", "GB"),
        ("extra memory of a learner's rank", "learner_bytes", "GB"),
        ("a learner's traffic, each way", "learner_bytes_per_s", "GB/s"),
        ("the syncer's traffic, each way", "syncer_bytes_per_s", "GB/s"),
        ("one checkpoint", "checkpoint_bytes", "GB"),
    ):
        table.add_row(label, f"{sizes[key] / 1e9:.3g} {unit}")
    Console(highlight=False).print(table)
