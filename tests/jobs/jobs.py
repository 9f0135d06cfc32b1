"""Start MPI jobs from a test, hurt single ranks, and never leave a process behind.

Here: building the launch commands, starting, waiting with a deadline, finding a job's processes, killing.
Not here: what the jobs do (programs beside the tests) and what is asserted about them.

Guards give each rank a session of its own, so neither a process group nor a session holds a whole job. Every
process of a job carries a mark in its environment, and is found by it in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

MARK_VARIABLE = "PYDDL_TEST_JOB"
ROOT = Path(__file__).resolve().parents[2]
OPENMPI_ENVIRONMENT = ROOT / ".venv-openmpi"

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
# A test run that is itself below a launcher must not hand its place in that job on to the jobs it starts.
_LAUNCHER_PREFIXES = ("PMI", "HYD", "MPIR_", "MPI_LOCAL", "OMPI_", "PRTE", "PMIX", "PYDDL_")
_DUMP_S = 1.0
_END_S = 5.0


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        returncode: of the launcher; negative if a signal ended it.
        stdout: all of it.
        stderr: all of it.
        duration_s: from start to end.
    """

    returncode: int
    stdout: str
    stderr: str
    duration_s: float

    def __str__(self) -> str:
        return (
            f"job ended with {self.returncode} after {self.duration_s:.1f} s\n"
            f"--- stdout\n{_shortened(self.stdout)}\n--- stderr\n{_shortened(self.stderr)}"
        )


@dataclass(frozen=True)
class JobProcess:
    """One process of a job, as /proc shows it.

    Attributes:
        pid: process id.
        parent_pid: its parent.
        rank: rank by the launcher's variable; None for the launcher itself.
        is_guarded: a guard is above it (the guard itself is not).
    """

    pid: int
    parent_pid: int
    rank: int | None
    is_guarded: bool


class Job:
    """A running job, a context manager: on leaving, whatever still runs is killed.

    When a deadline passes, each program that has called ``faulthandler.register(signal.SIGUSR2)`` is asked
    for its stacks.

    Args:
        argv: the launch command, see :func:`mpich_command` and :func:`openmpi_command`.
        env: set on top of this process's environment, from which launchers' variables are taken out.
        cwd: working directory; None: this process's.
    """

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.argv = [os.fspath(word) for word in argv]
        self.mark = uuid.uuid4().hex
        self._env = {**base_environment(), **(env or {}), MARK_VARIABLE: self.mark}
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._files = contextlib.ExitStack()

    def __enter__(self) -> Job:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> Job:
        """Start the launcher; returns the job."""
        assert self._process is None, "a Job is started once"
        # Files, not pipes: nobody has to read while the job runs, and nobody left over can block the wait.
        self._stdout = self._files.enter_context(tempfile.TemporaryFile())
        self._stderr = self._files.enter_context(tempfile.TemporaryFile())
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
        )
        return self

    @property
    def stdout(self) -> str:
        """What has come so far."""
        return _read(self._stdout.fileno())

    @property
    def stderr(self) -> str:
        """What has come so far."""
        return _read(self._stderr.fileno())

    def poll(self) -> int | None:
        """The launcher's exit code, or None while it runs."""
        assert self._process is not None, "start the job first"
        return self._process.poll()

    @property
    def launcher_pid(self) -> int:
        """Pid of what was started: the launcher, or a guard where the command began with one."""
        assert self._process is not None, "start the job first"
        return self._process.pid

    def wait(self, timeout_s: float) -> JobResult:
        """Wait for the end. If it does not come, show all stacks, kill the job and fail the test."""
        assert self._process is not None, "start the job first"
        try:
            returncode = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            left = "\n".join(map(str, self.processes()))
            self._end_processes()
            pytest.fail(
                f"{' '.join(self.argv)} must end within {timeout_s} s; it did not.\n{left}\n"
                f"--- stdout\n{_shortened(self.stdout)}\n--- stderr\n{_shortened(self.stderr)}"
            )
        return JobResult(returncode, self.stdout, self.stderr, time.monotonic() - self._started_s)

    def wait_for_output(self, text: str, timeout_s: float, *, count: int = 1) -> None:
        """Wait until stdout holds ``text`` ``count`` times; fail the test if the job ends or time passes."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.stdout.count(text)) < count:
            returncode = self.poll()
            if (returncode is not None and self.stdout.count(text) < count) or time.monotonic() > deadline_s:
                self._dump_stacks()
                pytest.fail(
                    f"{text!r} must be printed {count} times within {timeout_s} s; it was {found} times "
                    f"(the job {'runs' if returncode is None else f'ended with {returncode}'}).\n"
                    f"--- stdout\n{_shortened(self.stdout)}\n--- stderr\n{_shortened(self.stderr)}"
                )
            time.sleep(0.02)

    def processes(self) -> list[JobProcess]:
        """All living processes of the job, the launcher's included."""
        return list(_processes_with_mark(self.mark))

    @property
    def pids(self) -> list[int]:
        """Pids of all living processes of the job."""
        return [process.pid for process in self.processes()]

    def pids_of_rank(self, rank: int) -> list[int]:
        """Pids of a rank and of what it started, the rank first; its guard is not among them."""
        members = [process for process in self.processes() if process.rank == rank]
        if any(process.is_guarded for process in members):
            members = [process for process in members if process.is_guarded]
        return _parents_first(members)

    def guard_pid_of_rank(self, rank: int) -> int:
        """Pid of a rank's guard."""
        guards = [p.pid for p in self.processes() if p.rank == rank and not p.is_guarded]
        assert guards, f"rank {rank} has no guard"
        return guards[0]

    def kill_rank(self, rank: int, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal to one rank's own process; returns its pid."""
        pids = self.pids_of_rank(rank)
        assert pids, f"rank {rank} must be alive to be killed; living: {self.processes()}"
        os.kill(pids[0], signal_number)
        return pids[0]

    def interrupt(self) -> None:
        """Ctrl-C, as the launcher gets it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End every process of the job, reap the launcher and close the files. Again: does nothing."""
        self._end_processes()
        self._files.close()

    def _end_processes(self) -> None:
        # Again and again until none is found: what is killed may have been about to fork.
        deadline_s = time.monotonic() + _END_S
        segments: set[Path] = set()
        while pids := self.pids:
            for pid in pids:
                segments |= _segments_of(pid)  # they would stay: nobody reaches MPI_Finalize
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._process is not None:
                self._process.poll()
            assert time.monotonic() < deadline_s, f"processes {pids} cannot be killed"
            time.sleep(0.01)
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._process is not None:
            self._process.wait(_END_S)

    def _dump_stacks(self) -> None:
        """Ask every process that has registered for it to print its stacks."""
        asked = False
        for process in self.processes():
            if process.rank is not None and _catches(process.pid, signal.SIGUSR2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR2)
                    asked = True
        if asked:
            time.sleep(_DUMP_S)


def run_job(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> JobResult:
    """Run a job to its end; the test fails if that takes longer than ``timeout_s``."""
    with Job(argv, env=env, cwd=cwd) as job:
        return job.wait(timeout_s)


def mpich_command(
    num_ranks: int,
    *,
    survivable: bool,
    tcp: bool = False,
    netmod: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Launch command of MPICH's hydra; the program and its arguments are to be appended.

    Args:
        num_ranks: size of the world.
        survivable: put a guard above each rank.
        tcp: ranks talk over TCP although they share a host: ofi on the loopback device; ucx on any other,
            and it needs one (it finds no way from lo to lo).
        netmod: ucx or ofi; None: MPICH's default.
        env: further variables for every rank.
    """
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip(f"MPICH's mpiexec is not beside {sys.executable}")
    variables = dict(env or {})
    if tcp:
        variables |= {"MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
        variables |= {"UCX_TLS": "tcp"}
    if netmod is not None:
        variables["MPIR_CVAR_CH4_NETMOD"] = netmod
    words = [os.fspath(mpiexec)]
    for name, value in variables.items():
        words += ["-genv", name, value]
    words += ["-n", str(num_ranks)]
    return [*words, *guard_command()] if survivable else words


def openmpi_command(num_ranks: int, *, ulfm: bool = True, env: Mapping[str, str] | None = None) -> list[str]:
    """Launch command of Open MPI; the program and its arguments are to be appended.

    Open MPI and MPICH cannot share one environment: its own is ``.venv-openmpi`` in the checkout. The test is
    skipped where it is missing. Use :func:`openmpi_python` for the program.

    Args:
        num_ranks: size of the world.
        ulfm: start with fault tolerance.
        env: further variables for every rank.
    """
    words = [os.fspath(_openmpi_program("mpirun")), "--oversubscribe", "--mca", "osc", "^ucx"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if ulfm:
        words += ["--with-ft", "ulfm"]
    for name, value in (env or {}).items():
        words += ["-x", f"{name}={value}"]
    return [*words, "-n", str(num_ranks)]


def openmpi_python() -> str:
    """The Python of the Open MPI environment; the test is skipped where it is missing."""
    return os.fspath(_openmpi_program("python"))


def guard_command() -> list[str]:
    """The words that put a guard above the command that follows."""
    return [sys.executable, "-m", "pyddl.run.guard"]


def base_environment() -> dict[str, str]:
    """This process's environment without any launcher's variables, with the checkout importable."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    environment.pop("PYTHONUNBUFFERED", None)  # a line in several writes gets mixed with those of other ranks
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    return environment


def _openmpi_program(name: str) -> Path:
    program = OPENMPI_ENVIRONMENT / "bin" / name
    if not program.exists():
        pytest.skip(f"Open MPI is not installed: {program} is missing (make setup-openmpi)")
    return program


def _processes_with_mark(mark: str) -> Iterator[JobProcess]:
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            words = Path(entry.path, "environ").read_bytes().split(b"\0")
            if wanted not in words:
                continue
            state, parent_pid = Path(entry.path, "stat").read_text().rpartition(") ")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or of another user
        if state in "ZX":
            continue
        values = dict(word.decode(errors="replace").partition("=")[::2] for word in words if word)
        rank = next((int(values[name]) for name in _RANK_VARIABLES if name in values), None)
        yield JobProcess(int(entry.name), int(parent_pid), rank, "PYDDL_GUARD" in values)


def _parents_first(members: list[JobProcess]) -> list[int]:
    pids = {process.pid for process in members}
    return [p.pid for p in sorted(members, key=lambda p: (p.parent_pid in pids, p.pid))]


def _segments_of(pid: int) -> set[Path]:
    """Files in /dev/shm by which MPICH and Open MPI share memory, as far as a process has them mapped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        names = {line.split(None, 5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        return {Path(name) for name in names if name.startswith(("/dev/shm/mpich_", "/dev/shm/vader", "/dev/shm/sm_"))}
    return set()


def _catches(pid: int, signal_number: int) -> bool:
    """Whether a process has a handler of its own for a signal (the others would die of it)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


def _read(descriptor: int) -> str:
    # pread: the job writes at the shared file position.
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _shortened(text: str, limit: int = 6000) -> str:
    return text if len(text) <= limit else f"{text[: limit // 3]}\n[...]\n{text[-limit * 2 // 3 :]}"
