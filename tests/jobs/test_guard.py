"""A guard alone, with a launcher played by the test; then whole MPI jobs in which ranks die.

The jobs' program is survivors.py. Every run has an outer deadline.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import (
    Job,
    base_environment,
    guard_command,
    mpich_command,
    openmpi_command,
    openmpi_python,
    run_job,
)

from pyddl.run import guard

SURVIVORS = str(Path(__file__).with_name("survivors.py"))
TIMEOUT_S = 25.0
HYDRA = "PMI_HOSTNAME"
PROTECT = "from pyddl.run.guard import protect; assert protect()"
NUM_OUTPUT_CHARACTERS = 500 * 199

StartJob = Callable[..., Job]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} must happen within {timeout_s} s"
        time.sleep(0.01)


# ----------------------------------------------------------------------------------- one guard, no MPI


def test_guard_command_that_ends_returns_its_status():
    result = run_job([*guard_command(), "sh", "-c", "echo out; exit 3"], timeout_s=TIMEOUT_S)
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "")


def test_guard_command_ended_by_signal_returns_128_plus_n_and_says_so():
    result = run_job(
        [*guard_command(), "sh", "-c", "echo $$; kill -KILL $$"], timeout_s=TIMEOUT_S, env={"PMI_RANK": "4"}
    )
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stderr == f"pyddl: rank 4 (pid {result.stdout.strip()}) was ended by SIGKILL\n"


def test_guard_command_that_cannot_be_run_is_named():
    result = run_job([*guard_command(), "no-such-program"], timeout_s=TIMEOUT_S)
    assert result.returncode == 127
    assert "'no-such-program': No such file or directory" in result.stderr


def test_guard_without_command_shows_usage():
    result = run_job(guard_command(), timeout_s=TIMEOUT_S)
    assert result.returncode == 2
    assert "usage: pyddl guard COMMAND" in result.stderr


def test_guard_imports_nothing_that_is_slow_to_load():
    code = "import sys; import pyddl.run.guard; print(*sys.modules)"
    result = run_job(python(code), timeout_s=TIMEOUT_S)
    loaded = set(result.stdout.split())
    assert "pyddl.run.guard" in loaded
    assert not {"mpi4py", "torch", "numpy", "h5py", "pyddl._C"} & loaded


def test_guard_that_is_killed_takes_its_rank_along(start_job: StartJob):
    job = start_job([*guard_command(), *python("import time; print('up', flush=True); time.sleep(60)")])
    job.wait_for_output("up", TIMEOUT_S)
    (rank_pid,) = (process.pid for process in job.processes() if process.is_guarded)
    os.kill(job.launcher_pid, signal.SIGKILL)
    wait_until(lambda: rank_pid not in job.pids, "the rank's end")


def test_guard_under_hydra_ends_with_its_launcher(start_job: StartJob):
    inner = [*guard_command(), *python("import time; print('up', flush=True); time.sleep(60)")]
    launcher = f"import subprocess; subprocess.run({inner!r})"
    job = start_job(python(launcher), env={HYDRA: "n1"})
    job.wait_for_output("up", TIMEOUT_S)
    assert len(job.pids) == 3
    os.kill(job.launcher_pid, signal.SIGKILL)
    wait_until(lambda: not job.pids, "the end of guard and rank")


REPORT_SIGNALS = """
import signal, time
def say(number, frame):
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, say)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("environ", "gets_usr1"),
    [({"PMI_RANK": "0"}, True), ({"PMI_RANK": "1"}, False), ({"SLURM_PROCID": "2"}, False), ({}, True)],
)
def test_guard_passes_signals_on_and_sigusr1_to_rank_0_alone(start_job: StartJob, environ, gets_usr1):
    job = start_job([*guard_command(), *python(REPORT_SIGNALS)], env=environ)
    job.wait_for_output("up", TIMEOUT_S)
    names = ["SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2"]
    expected = names if gets_usr1 else names[1:]
    for name in names:
        os.kill(job.launcher_pid, signal.Signals[name])
        if name in expected:
            job.wait_for_output(name, TIMEOUT_S)
    assert job.stdout.split() == ["up", *expected]


def test_guard_after_a_killed_rank_ends_what_the_rank_had_started(start_job: StartJob):
    job = start_job([*guard_command(), "sh", "-c", "sleep 60 & sleep 60 & echo up; kill -KILL $$"])
    result = job.wait(TIMEOUT_S)
    assert result.returncode == 128 + signal.SIGKILL
    wait_until(lambda: not job.pids, "the end of the rank's children")


def test_guard_after_a_rank_that_returned_leaves_its_children_alone(start_job: StartJob):
    job = start_job([*guard_command(), "sh", "-c", "sleep 60 & exit 0"])
    assert job.wait(TIMEOUT_S).returncode == 0
    assert len(job.pids) == 1


def test_guard_gives_its_rank_a_session_and_all_descriptors():
    code = "import os; print(os.getsid(0) == os.getpid(), os.fstat(int(os.environ['PMI_FD'])).st_ino)"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        result = subprocess.run(
            [*guard_command(), *python(code)],
            env={**base_environment(), "PMI_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        assert result.stdout.split() == ["True", str(os.fstat(theirs.fileno()).st_ino)]


KILL_SELF = "; import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("code", "environ", "said"),
    [
        pytest.param(PROTECT + KILL_SELF, {HYDRA: "n1"}, b"cmd=finalize\n", id="killed"),
        pytest.param(PROTECT + "; raise SystemExit(5)", {HYDRA: "n1"}, b"cmd=finalize\n", id="status"),
        pytest.param(PROTECT + "; protect()" + KILL_SELF, {HYDRA: "n1"}, b"cmd=finalize\n", id="twice"),
        pytest.param("0" + KILL_SELF, {HYDRA: "n1"}, b"", id="not protected"),
        pytest.param(PROTECT + KILL_SELF, {}, b"", id="not hydra"),
        pytest.param(PROTECT + KILL_SELF, {HYDRA: "n1", "MPIR_CVAR_PMI_VERSION": "2"}, b"", id="PMI 2"),
    ],
)
def test_guard_says_finalize_to_hydra_for_a_protected_rank_only(code, environ, said):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            guarded = subprocess.Popen(
                [*guard_command(), *python(code)],
                env={**base_environment(), **environ, "PMI_FD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        ours.settimeout(TIMEOUT_S)
        with guarded:
            heard = ours.recv(4096)
            if heard:
                ours.sendall(b"cmd=finalize_ack rc=0\n")
                assert ours.recv(4096) == b""
            assert heard == said
            assert guarded.wait(TIMEOUT_S) == (5 if "SystemExit" in code else 128 + signal.SIGKILL)


@pytest.mark.parametrize(
    ("environ", "said"),
    [({HYDRA: "n1"}, b"cmd=finalize\n"), ({}, b""), ({HYDRA: "n1", "MPIR_CVAR_PMI_VERSION": "2"}, b"")],
)
def test_rank_that_parts_from_hydra_says_finalize_itself(environ, said):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            rank = subprocess.Popen(
                python("__import__('pyddl.run.guard').run.guard.part_from_hydra(); raise SystemExit(5)"),
                env={**base_environment(), **environ, "PMI_FD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(TIMEOUT_S)
        with rank:
            heard = ours.recv(4096)
            if heard:
                ours.sendall(b"cmd=finalize_ack rc=0\n")
                assert ours.recv(4096) == b""
            assert heard == said
            assert rank.wait(TIMEOUT_S) == 5


def test_guard_when_hydra_does_not_answer_still_ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [*guard_command(), *python(PROTECT + KILL_SELF)],
            env={**base_environment(), HYDRA: "n1", "PMI_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 128 + signal.SIGKILL


def test_protect_without_guard_returns_false(monkeypatch):
    monkeypatch.delenv(guard.GUARD_FD_VARIABLE, raising=False)
    assert guard.protect() is False


def test_protect_when_the_descriptor_is_another_file_by_now_writes_nothing(monkeypatch, tmp_path):
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setenv(guard.GUARD_FD_VARIABLE, f"{file.fileno()}:1")
        assert guard.protect() is False
    assert (tmp_path / "file").read_bytes() == b""


def test_restart_under_guard_of_a_script_from_stdin_is_refused():
    code = "from pyddl.run.guard import restart_under_guard; restart_under_guard()"
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert "ConfigError: a script that can be started again" in done.stderr


# -------------------------------------------------------------------------------------------- MPI jobs


def assert_survived(stdout: str, survivors: set[int]) -> None:
    """Every survivor came to its end and all of its output arrived."""
    assert "syncer complete" in stdout
    assert {int(word) for word in re.findall(r"learner (\d+) complete", stdout)} == survivors
    assert stdout.count("#") == NUM_OUTPUT_CHARACTERS * (len(survivors) + 1)


@pytest.mark.parametrize(
    ("how", "victims", "options", "status"),
    [
        pytest.param("none", {2}, {}, 0, id="nobody"),
        pytest.param("kill", {2}, {}, 128 + signal.SIGKILL, id="SIGKILL"),
        pytest.param("kill", {2, 3}, {}, 128 + signal.SIGKILL, id="two by SIGKILL"),
        pytest.param("kill", {2}, {"netmod": "ofi", "tcp": True}, 128 + signal.SIGKILL, id="SIGKILL, ofi tcp"),
        pytest.param("segv", {1}, {}, 128 + signal.SIGSEGV, id="SIGSEGV"),
        pytest.param("exit", {3}, {}, 75, id="exit 75"),
        pytest.param("exception", {3}, {}, 1, id="exception"),
    ],
)
def test_world_under_guards_when_learners_die_goes_on(how, victims, options, status):
    argv = [*mpich_command(4, survivable=True, **options), sys.executable, SURVIVORS, how]
    result = run_job([*argv, ",".join(map(str, victims))], timeout_s=TIMEOUT_S)
    assert_survived(result.stdout, {1, 2, 3} - (set() if how == "none" else victims))
    assert result.returncode == status


def test_world_that_restarts_under_guards_when_a_learner_dies_goes_on():
    argv = [*mpich_command(3, survivable=False), sys.executable, SURVIVORS, "restart", "2"]
    result = run_job(argv, timeout_s=TIMEOUT_S)
    assert_survived(result.stdout, {1})
    assert result.returncode == 128 + signal.SIGKILL


def test_world_without_guards_when_a_learner_dies_ends():
    # The reason for guards. If this ever fails, MPICH has learnt to survive by itself.
    argv = [*mpich_command(3, survivable=False), sys.executable, SURVIVORS, "kill", "2"]
    result = run_job(argv, timeout_s=TIMEOUT_S)
    assert result.returncode != 0
    assert "complete" not in result.stdout


@pytest.mark.parametrize("how", ["early", "abort"])
def test_world_under_guards_ends_when_a_rank_dies_before_set_up_or_aborts(how):
    argv = [*mpich_command(3, survivable=True), sys.executable, SURVIVORS, how, "2", "4"]
    result = run_job(argv, timeout_s=TIMEOUT_S)
    assert result.returncode != 0
    assert result.duration_s < 4
    assert "complete" not in result.stdout


SHOW_SEGMENTS = f"""
import os
from mpi4py import MPI
with open("/proc/self/maps") as file:
    paths = {{line.split(None, 5)[-1].strip() for line in file if "/dev/shm/mpich" in line}}
print(*(f"segment {{path}}" for path in paths if os.path.exists(path)), sep="\\n", flush=True)
MPI.COMM_WORLD.Barrier()
{PROTECT}
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "MPI.Finalize()"])
def test_world_that_is_protected_leaves_nothing_in_shared_memory(end):
    argv = [*mpich_command(2, survivable=True), *python(SHOW_SEGMENTS + end)]
    result = run_job(argv, timeout_s=TIMEOUT_S)
    paths = re.findall(r"segment (/dev/shm/\w+)", result.stdout)
    assert paths, "MPICH must have mapped a segment, or this test sees nothing"
    assert not [path for path in paths if os.path.exists(path)]
    assert result.returncode == 0
    assert result.stderr == ""


WORLD_OF_SIGNALS = f"""
import signal, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
def say(number, frame):
    print("rank", rank, signal.Signals(number).name, flush=True)
signal.signal(signal.SIGUSR1, say)
signal.signal(signal.SIGTERM, say)
MPI.COMM_WORLD.Barrier()
{PROTECT}
print("up", flush=True)
time.sleep(60)
"""


def test_world_under_guards_hears_signals_to_mpiexec(start_job: StartJob):
    job = start_job([*mpich_command(2, survivable=True), *python(WORLD_OF_SIGNALS)])
    job.wait_for_output("up", TIMEOUT_S, count=2)
    for name, count in (("SIGUSR1", 1), ("SIGTERM", 2)):
        os.kill(job.launcher_pid, signal.Signals[name])
        job.wait_for_output(name, TIMEOUT_S, count=count)
    assert sorted(job.stdout.splitlines()[2:]) == ["rank 0 SIGTERM", "rank 0 SIGUSR1", "rank 1 SIGTERM"]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_world_under_open_mpi_with_ulfm_when_a_learner_dies_goes_on(how):
    guarded = [openmpi_python(), "-m", "pyddl.run.guard", openmpi_python(), SURVIVORS, how, "2"]
    result = run_job([*openmpi_command(4), *guarded], timeout_s=TIMEOUT_S)
    assert_survived(result.stdout, {1, 3})


# ----------------------------------------------------------------------------------------- the harness


def test_job_past_its_deadline_fails_with_stacks_and_leaves_nothing():
    code = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR2); print('up', flush=True)"
    argv = [*mpich_command(2, survivable=True), *python(code + "; time.sleep(60)")]
    with Job(argv) as job:
        job.wait_for_output("up", TIMEOUT_S, count=2)
        with pytest.raises(pytest.fail.Exception, match=r"(?s)must end within 0.1 s.*most recent call first"):
            job.wait(0.1)
        assert job.pids == []


def test_job_kill_rank_hits_the_rank_and_not_its_guard(start_job: StartJob):
    job = start_job([*mpich_command(2, survivable=True), *python(WORLD_OF_SIGNALS)])
    job.wait_for_output("up", TIMEOUT_S, count=2)
    before = {rank: job.pids_of_rank(rank) for rank in (0, 1)}
    guard_pid = job.guard_pid_of_rank(1)
    assert guard_pid not in before[1]
    assert job.kill_rank(1) == before[1][0]
    wait_until(lambda: job.pids_of_rank(1) == [], "the rank's end")
    wait_until(lambda: f"rank 1 (pid {before[1][0]}) was ended by SIGKILL" in job.stderr, "the guard's line")
    assert job.pids_of_rank(0) == before[0]
    job.kill()
    assert job.pids == []
