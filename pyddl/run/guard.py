"""The small parent of one rank, so that the rank's death does not end the others (MPICH, world mode).

Here: start one command in a session of its own, tie its life to ours, pass signals on, tell hydra that the
rank is done when it has died, report how it ended. Not here: MPI (this process never calls it), restarting what
has died, telling launchers apart (run/launcher.py).

Use: ``mpiexec -n 5 pyddl guard python train.py``, with ``python -m pyddl.run.guard`` for ``pyddl guard``
if you like. One guard stands beside each rank, so only the standard library is imported, and little of
it.

Why it works. Hydra ends the job when a rank's PMI connection closes before the rank has said ``finalize``
on it, or when a signal ends what it started. The guard holds the same connection, says it in the place of
a rank that died, and ends by an exit status. Open MPI (``--with-ft ulfm``) is the other way round: it
survives signals and not statuses, so there the guard ends by a signal.

All this only for a rank that has called :func:`protect`: before all ranks are set up, the death of one
must end the job, or the others would wait in MPI_Init for ever. MPI_Abort ends the job in every case: it
is what it is for. What survives what, measured, is in docs/mpi.md.

SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR2 are passed on. SIGUSR1, which Slurm and users send before a
time limit to every task, is passed on by the guard of rank 0 alone, where the syncer is: the learners
learn of the end from their board, and a Python that has not asked for the signal would die of it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

__all__ = [
    "GUARD_FD_VARIABLE",
    "GUARD_VARIABLE",
    "main",
    "part_from_hydra",
    "protect",
    "restart_under_guard",
    "run",
    "unlink_segments",
]

GUARD_VARIABLE = "PYDDL_GUARD"
"""Set to the guard's pid in the environment of its rank."""

GUARD_FD_VARIABLE = "PYDDL_GUARD_FD"
"""Set to the descriptor (and its inode) on which :func:`protect` tells the guard that the rank is set up."""

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_HYDRA_VARIABLE = "PMI_HOSTNAME"  # set by hydra's proxy for what it starts, not by Slurm or Open MPI
_OPENMPI_VARIABLE = "OMPI_COMM_WORLD_SIZE"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
_WATCHED = frozenset((*_PASSED_ON, signal.SIGUSR1, signal.SIGCHLD))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SEGMENT_PREFIX = b"/dev/shm/mpich_shm_"
_PMI_FINALIZE = b"cmd=finalize\n"  # PMI-1 wire protocol; the proxy answers cmd=finalize_ack
_PMI_ANSWER_S = 2.0

_USAGE = """\
usage: pyddl guard COMMAND [ARGUMENT...]

Runs COMMAND as one rank of an MPI job and keeps its death from ending the other ranks:
    mpiexec -n 5 pyddl guard python train.py
"""


def protect() -> bool:
    """From now on the death of this rank is to be survived by the others; called in the rank, after set-up.

    Until then the guard lets the launcher end the job when the rank dies. All ranks must have come through
    MPI_Init and a barrier, as for :func:`unlink_segments`, which this calls. Calling it again does nothing.

    Returns:
        Whether a guard has been told: False if this process was not started by one.
    """
    unlink_segments()
    word = os.environ.pop(GUARD_FD_VARIABLE, "")  # popped: not ours to give to further processes
    number, _, inode = word.partition(":")
    try:
        # A wrapper between guard and rank may have closed it, and the number may mean another file by now.
        if not number.isdecimal() or str(os.fstat(int(number)).st_ino) != inode:
            return False
        os.write(int(number), b"1")
        os.close(int(number))
    except OSError:
        return False
    return True


def unlink_segments() -> int:
    """Take the names of MPICH's shared memory off /dev/shm; the memory lives as long as it is mapped.

    MPICH does so in MPI_Finalize, which a rank that is killed or leaves after a loss never reaches: 1 MB a
    rank would stay until the host is started anew. MPICH's Finalize does not mind that they are gone (5.0.2).
    To be called after MPI_Init and a barrier: nobody on this host may have to open them any more.

    Returns:
        How many names this process took off; 0 where another rank was first or MPI is not MPICH.
    """
    try:
        with open("/proc/self/maps", "rb") as file:
            mapped = {line.split(None, 5)[-1].strip() for line in file if _SEGMENT_PREFIX in line}
    except OSError:
        return 0
    num_unlinked = 0
    for path in mapped:
        try:
            # Windows' segments have lost their names already and are shown as "NAME (deleted)".
            os.unlink(path)
            num_unlinked += 1
        except OSError:
            pass
    return num_unlinked


def restart_under_guard() -> NoReturn:
    """Replace this process, which must not have started MPI, by a guard that starts the same command again.

    For a script that hydra has started without ``pyddl guard``. The launcher sees the same pid, the
    descriptors stay. An exec rather than a fork: after a fork, OpenMP and CUDA would be unusable in the
    child if the script has used them. So the script runs again from its first line: call this early.

    Raises:
        ConfigError: if the script came from stdin, which cannot be read twice.
    """
    words = list(sys.orig_argv)
    if "-" in words[1:2] or len(words) == 1:
        from pyddl.errors import ConfigError

        raise ConfigError(
            "a script that can be started again (a file, -m or -c) is required to put it under a guard; it "
            "came from stdin. Write it to a file, or start it with: pyddl guard python SCRIPT"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # This file itself, isolated and without site-packages, which the guard does not need.
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, sys.executable, *words[1:]])


def part_from_hydra() -> None:
    """Say ``finalize`` on this rank's PMI connection, so that hydra takes its end for no failure of the job.

    For a rank that has died, by its guard; for one that ends in good order without MPI_Finalize, by itself: without a
    guard hydra would end the others, and the job with the status that this rank has. Harmless after MPI_Finalize and a
    second time, and under other launchers, where it does nothing.
    """
    word = os.environ.get("PMI_FD", "")
    if _HYDRA_VARIABLE not in os.environ or not word.isdecimal():
        return  # another launcher; its protocol is its own
    if os.environ.get("MPIR_CVAR_PMI_VERSION", "1") != "1":
        return  # the user chose another wire protocol, in which this line would be an error
    connection = int(word)
    try:
        os.write(connection, _PMI_FINALIZE)
        # The answer shows that the line was read before our end closes the connection.
        ready, _, _ = select.select([connection], [], [], _PMI_ANSWER_S)
        if ready:
            os.read(connection, 4096)
    except OSError:
        pass  # the connection or the proxy is gone


def run(argv: Sequence[str]) -> int:
    """Run one command as the guarded rank and wait for its end.

    Must be called from the main thread of a process that has no other threads: the child is made by fork, and
    dies when the thread that made it ends.

    Args:
        argv: the command and its arguments; looked up in PATH.

    Returns:
        The command's exit status; 128 + n if signal n ended it; 127 if it could not be started. Under Open
        MPI it does not return when a protected rank has failed: the guard dies by SIGKILL.
    """
    name = _describe_self(os.environ)
    libc = ctypes.CDLL(None, use_errno=True)
    # Blocked before the fork, so that no signal falls between start and wait: each is kept for sigwaitinfo.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # If it is inherited as ignored, the child vanishes and wait finds nobody.
    previous_action = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _HYDRA_VARIABLE in os.environ:
        _die_with_parent(libc, os.getppid())
    guard_pid = os.getpid()
    protect_read, protect_write = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        _become(argv, guard_pid, protect_write, previous_mask, libc)
    os.close(protect_write)
    try:
        wait_status = _watch(child_pid, os.environ)
    finally:
        signal.signal(signal.SIGCHLD, previous_action)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    is_protected = _was_told(protect_read)
    if is_protected:
        part_from_hydra()  # in the place of the child, whose connection is ours too
    if os.WIFSIGNALED(wait_status):
        # What the rank had started (data workers) would hold stdout open, and the launcher waits for its end.
        _kill_group(child_pid)
        number = os.WTERMSIG(wait_status)
        status = 128 + number
        _say(f"pyddl: {name} (pid {child_pid}) was ended by {_signal_name(number)}")
    else:
        status = os.WEXITSTATUS(wait_status)
    if is_protected and status != 0 and _OPENMPI_VARIABLE in os.environ:
        # Open MPI with ulfm takes a death by signal as a loss, but ends the job after any exit status but 0.
        if os.WIFEXITED(wait_status):
            _say(f"pyddl: {name} (pid {child_pid}) ended with status {status}")
        os.kill(os.getpid(), signal.SIGKILL)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``pyddl guard`` and ``python -m pyddl.run.guard``; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        os.write(1, _USAGE.encode())
        return 0
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        _say(f"pyddl guard: a command to run is required; none came\n{_USAGE}".rstrip())
        return 2
    try:
        return run(words)
    except KeyboardInterrupt:  # while nothing is guarded yet, or any more
        return 128 + signal.SIGINT


def _become(argv: Sequence[str], guard_pid: int, protect_write: int, mask: set[int], libc: ctypes.CDLL) -> None:
    """In the child: leave the guard's session, die with the guard, become the command. Does not return."""
    try:
        os.setsid()
        _die_with_parent(libc, guard_pid)
        os.set_inheritable(protect_write, True)
        word = f"{protect_write}:{os.fstat(protect_write).st_ino}"
        environment = {**os.environ, GUARD_VARIABLE: str(guard_pid), GUARD_FD_VARIABLE: word}
        # Python ignores these two; ignored signals survive exec, handlers do not.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # No descriptor is closed: hydra's PMI connection (PMI_FD) must reach the rank.
        os.execvpe(argv[0], list(argv), environment)
    except OSError as error:
        _say(f"pyddl guard: a command that can be run is required; {argv[0]!r}: {error.strerror}")
    finally:
        os._exit(127)


def _die_with_parent(libc: ctypes.CDLL, parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    Only for a parent without threads: the signal comes when the thread that forked ends. Hydra's proxy has
    none; Slurm's step daemon has many.
    """
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # 1. fork; 2. the parent is killed; 3. prctl: nobody is left to die, so no signal would ever come.
    if os.getppid() != parent_pid:
        os._exit(1)


def _watch(child_pid: int, environ: Mapping[str, str]) -> int:
    """Pass signals on until the child has ended; returns its wait status."""
    rank = next((environ[name] for name in _RANK_VARIABLES if name in environ), "0")
    while True:
        number = signal.sigwaitinfo(_WATCHED).si_signo
        if number == signal.SIGCHLD:
            # Sent when the child stops or goes on, too.
            ended_pid, wait_status = os.waitpid(child_pid, os.WNOHANG)
            if ended_pid == child_pid:
                return wait_status
        elif number != signal.SIGUSR1 or rank == "0":
            # The child is not reaped yet, so its pid cannot belong to anybody else.
            os.kill(child_pid, number)


def _was_told(protect_read: int) -> bool:
    """Whether the rank called :func:`protect` before it ended."""
    os.set_blocking(protect_read, False)
    try:
        return bool(os.read(protect_read, 1))
    except BlockingIOError:  # not told, and a process that the rank has started still holds the other end
        return False
    finally:
        os.close(protect_read)


def _kill_group(group_id: int) -> None:
    try:
        os.killpg(group_id, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody was left


def _describe_self(environ: Mapping[str, str]) -> str:
    for name in _RANK_VARIABLES:
        if name in environ:
            return f"rank {environ[name]}"
    return "the rank"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between the first and the last have no name
        return f"signal {number}"


def _say(line: str) -> None:
    # One write: the lines of several guards share one pipe.
    try:
        os.write(2, (line + "\n").encode(errors="replace"))
    except OSError:
        pass  # the launcher that read it is gone


if __name__ == "__main__":
    sys.exit(main())
