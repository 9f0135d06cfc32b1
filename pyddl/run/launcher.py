"""Which launcher started this process, read from the environment before MPI starts.

Here: launcher, rank, number of tasks, and whether the launcher lets the others live when one rank dies.
Not here: MPI, and anything that would change how the job was started (run/guard.py). Standard library only.

``survives`` is about the death of a rank's process. It is True only where that was measured (docs/mpi.md),
False where the job is known to end, and None where it cannot be seen from inside. No launcher of one world
survives the loss of the host that the launcher itself runs on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .guard import GUARD_VARIABLE

if TYPE_CHECKING:
    from ..errors import PyddlError

__all__ = ["Launcher", "detect", "expected_tasks", "has_shown_error", "say_by_first", "say_once"]

_MAX_ANCESTORS = 8

_has_shown_error = False


@dataclass(frozen=True)
class Launcher:
    """How this process was started.

    Attributes:
        name: mpich (hydra or another of MPICH's), openmpi, slurm (srun), or none.
        num_tasks: tasks that were started together; None where the launcher does not say.
        rank: this process's number among them.
        guarded: a guard is above this process (run/guard.py).
        ulfm: Open MPI was started with fault tolerance; None under another launcher.
        survives: whether the others live when one rank's process dies; None: not known.
        advice: one sentence, what to do so that they live, or why it is not known; empty if they do.
    """

    name: str
    num_tasks: int | None = None
    rank: int | None = None
    guarded: bool = False
    ulfm: bool | None = None
    survives: bool | None = None
    advice: str = ""


def detect(environ: Mapping[str, str] | None = None, ancestors: Sequence[str] | None = None) -> Launcher:
    """Find out which launcher started this process and what it does when a rank dies.

    The innermost launcher counts: hydra or Open MPI inside a Slurm step, then Slurm.

    Args:
        environ: environment to read; None: this process's.
        ancestors: command lines of the processes above this one; None: read from /proc. They tell the
            launcher's options where it runs on this host, as it does for rank 0 in nearly every start.
    """
    environ = os.environ if environ is None else environ
    ancestors = list(_ancestors()) if ancestors is None else ancestors
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _openmpi(environ, ancestors)
    if "PMI_HOSTNAME" in environ:  # not HYDI_CONTROL_FD, which is missing below hydra's Slurm and ssh starts
        return _hydra(environ, ancestors)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if "PMI_SIZE" in environ or "PMI_RANK" in environ:
        return Launcher(
            "mpich",
            _number(environ, "PMI_SIZE"),
            _number(environ, "PMI_RANK"),
            guarded=GUARD_VARIABLE in environ,
            advice="The launcher is not MPICH's hydra and what it does is not known; "
            "start with MPICH's mpiexec.hydra -n N pyddl guard python SCRIPT.",
        )
    return Launcher("none", guarded=GUARD_VARIABLE in environ)


def expected_tasks(environ: Mapping[str, str] | None = None) -> int | None:
    """How many tasks the launcher says it started together; None if no launcher is seen.

    A world of size 1 where more than one task is expected means that MPI and launcher do not speak the same
    PMI: every task would train alone. (Slurm may count the parts of an MPMD start each for itself.)
    """
    # Options are not asked for here, so no ancestors are needed.
    return detect(environ, ancestors=()).num_tasks


def _openmpi(environ: Mapping[str, str], ancestors: Sequence[str]) -> Launcher:
    # mpirun --with-ft ulfm sets it for every rank; --enable-recovery sets nothing.
    ulfm = environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")
    if any(_program(line) in ("prterun", "mpirun") and "--with-ft" not in line for line in ancestors):
        ulfm = False  # the variable was set by hand: MPI would survive, the launcher ends the job
    guarded = GUARD_VARIABLE in environ
    advice = ""
    if not ulfm:
        advice = "Start with Open MPI 5 or newer: mpirun --with-ft ulfm -n N pyddl guard python SCRIPT."
    elif not guarded:
        advice = (
            "A rank may be killed but not fail by an exit status; start with: "
            "mpirun --with-ft ulfm -n N pyddl guard python SCRIPT."
        )
    return Launcher(
        "openmpi",
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        guarded=guarded,
        ulfm=ulfm,
        survives=not advice,
        advice=advice,
    )


def _hydra(environ: Mapping[str, str], ancestors: Sequence[str]) -> Launcher:
    guarded = GUARD_VARIABLE in environ
    advice = ""
    if not guarded:
        advice = "Start with: mpiexec -n N pyddl guard python SCRIPT."
    elif "PMI_FD" not in environ:
        advice = "Start mpiexec without -pmi-port: the guard needs the PMI connection that hydra hands down."
    elif environ.get("MPIR_CVAR_PMI_VERSION", "1") != "1":
        advice = "Take MPIR_CVAR_PMI_VERSION out of the environment: the guard speaks PMI version 1 only."
    elif _has_frail_transport(environ):
        advice = "Set MPIR_CVAR_CH4_NETMOD=ucx or FI_PROVIDER=tcp: with other providers of ofi survivors hang."
    elif any("-disable-auto-cleanup" in line for line in ancestors):
        advice = "Start mpiexec without -disable-auto-cleanup: with it hydra's proxy crashes below a guard."
    return Launcher(
        "mpich",
        _number(environ, "PMI_SIZE"),
        _number(environ, "PMI_RANK"),
        guarded=guarded,
        survives=not advice,
        advice=advice,
    )


def _slurm(environ: Mapping[str, str]) -> Launcher:
    survives: bool | None = None
    advice = (
        "Whether srun lets the others live depends on options that a task cannot see; use "
        "srun --mpi=pmi2 --kill-on-bad-exit=0 --wait=0 --no-kill with MPICH and MPIR_CVAR_CH4_NETMOD=ucx."
    )
    if environ.get("SLURM_KILL_BAD_EXIT", "0") != "0":
        survives = False
        advice = "Start srun with --kill-on-bad-exit=0 and SLURM_KILL_BAD_EXIT unset."
    elif environ.get("SLURM_WAIT", "0") != "0":
        survives = False
        advice = "Start srun with --wait=0 and SLURM_WAIT unset."
    # Not SLURM_NTASKS: that is the allocation's, also in an interactive step of one task.
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    return Launcher(
        "slurm",
        tasks,
        _number(environ, "SLURM_PROCID"),
        guarded=GUARD_VARIABLE in environ,
        survives=survives,
        advice=advice,
    )


def _has_frail_transport(environ: Mapping[str, str]) -> bool:
    """MPICH's ofi on a provider with which survivors hung or died in 12 of 40 runs (docs/mpi.md)."""
    return environ.get("MPIR_CVAR_CH4_NETMOD") == "ofi" and environ.get("FI_PROVIDER") != "tcp"


def _program(line: str) -> str:
    return line.split(" ", 1)[0].rpartition("/")[2]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    word = environ.get(name, "").strip()
    return int(word) if word.isdecimal() else None


def _ancestors() -> Iterator[str]:
    """Command lines of the processes above this one, the nearest first; ends where /proc tells nothing."""
    pid = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        if pid <= 1:
            return
        try:
            yield Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def say_once(error: PyddlError) -> None:
    """Show an error by one rank: before MPI runs all find the same mistake, afterwards only the one that shows it."""
    global _has_shown_error
    _has_shown_error = True
    if not error.is_told and ("pyddl.link.world" in sys.modules or _is_first()):
        sys.stderr.write(f"pyddl: {error}\n")


def say_by_first(sentence: str) -> None:
    """Show what happens to all ranks alike."""
    if _is_first():
        sys.stderr.write(f"pyddl: {sentence}\n")


def has_shown_error() -> bool:
    """Whether this process has shown an error, or would have if another rank did not."""
    return _has_shown_error


def _is_first() -> bool:
    return detect(ancestors=()).rank in (None, 0)
