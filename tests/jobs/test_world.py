"""Runs in world mode with real processes that are killed, stopped and made to fail; one test per sentence about faults.

The jobs' program is programs/train.py. Every run has an outer deadline. Times are compared within one run only.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job, mpich_command, openmpi_command, openmpi_python

from pyddl.store.checkpoint import Checkpoint, newest_good_checkpoint
from pyddl.store.lock import RunLock
from pyddl.store.trace import read_trace

PROGRAM = str(Path(__file__).parent / "programs" / "train.py")
SETUP_S = 90.0  # imports of torch on a loaded machine
END_S = 90.0
FAR = "run.max_steps=1000000"  # the test ends such a run itself

StartJob = Callable[..., Job]


class Run:
    """One run in a folder of its own: the job, and what it leaves on disk."""

    def __init__(self, start_job: StartJob, folder: Path, num_learners: int, words: list[str], **how: Any) -> None:
        self.folder = folder
        self.num_ranks = next((int(w.split("=")[1]) for w in words if w.startswith("run.ranks=")), 1)
        self.members = [(m, g) for m in range(num_learners) for g in range(self.num_ranks)]
        size = how.pop("size", 1 + num_learners * self.num_ranks)
        how.setdefault("survivable", True)
        command = how.pop("command", None) or [*mpich_command(size, **how), sys.executable]
        self.job = start_job([*command, PROGRAM, str(folder), *words])

    def wait_until_attached(self) -> None:
        self.job.wait_for_output(" attached ", SETUP_S, count=len(self.members))

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = END_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                self.job.kill_rank(0, signal.SIGUSR2)
                time.sleep(1)
                pytest.fail(f"{what} must come within {timeout_s} s\n{self.job.stdout}\n{self.job.stderr}")
            time.sleep(0.05)

    def wait_for_steps(self, number: int, members: list[tuple[int, int]] | None = None) -> None:
        """Until each of some ranks has made so many steps."""
        for member in members or self.members:
            self.wait_for(lambda member=member: len(self.steps(member)) >= number, f"step {number} of {member}")

    def wait_for_more_steps(self, number: int, members: list[tuple[int, int]]) -> None:
        goals = {member: len(self.steps(member)) + number for member in members}
        for member, goal in goals.items():
            self.wait_for_steps(goal, [member])

    def wait_for_merges(self, number: int, accept: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        """Until so many more merges that ``accept`` likes are on the tape."""
        before = len([e for e in self.events("Publish") if accept(e)])
        self.wait_for(
            lambda: len([e for e in self.events("Publish") if accept(e)]) >= before + number, f"{number} more merges"
        )

    def stop(self) -> Any:
        """End the run in good order, as a user or a batch system would; no process may be left."""
        self.job.kill_rank(0, signal.SIGTERM)
        return self.end()

    def end(self) -> Any:
        """Wait for the end of the job; no process may be left."""
        result = self.job.wait(END_S)
        assert self.job.processes() == []
        return result

    def steps(self, member: tuple[int, int]) -> np.ndarray:
        """[n, 2] float64: end of each step on time.monotonic's clock, seconds inside learner.step()."""
        path = self.folder / f"steps-{member[0]}-{member[1]}.bin"
        raw = path.read_bytes() if path.exists() else b""
        return np.array([*struct.iter_unpack("dd", raw[: len(raw) // 16 * 16])]).reshape(-1, 2)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        return [e for e in read_trace(path) if not kinds or e["kind"] in kinds] if path.exists() else []

    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint, which must be good."""
        checkpoint, _, bad = newest_good_checkpoint(self.folder / "run")
        assert bad == []
        assert all(np.isfinite(f.theta).all() for f in checkpoint.fragments)
        return checkpoint

    def assert_ended_in_order(self, result: Any, survivors: list[tuple[int, int]]) -> None:
        for m, g in survivors:
            assert f"learner {m}-{g} done" in result.stdout, str(result)
        (end,) = self.events("Result")
        assert end["outcome"] == "drained", str(result)
        assert "Traceback" not in result.stderr or "the test's exception" in result.stderr, str(result)
        self.checkpoint()


def durations(steps: np.ndarray) -> np.ndarray:
    return np.diff(steps[:, 0])


def assert_no_step_lost(run: Run, members: list[tuple[int, int]], *hurt_s: float) -> None:
    """Around the faults no survivor paused longer than it does anyhow: a few steps, or what it pauses elsewhere."""
    for member in members:
        steps = run.steps(member)
        ends, gaps = steps[1:, 0], durations(steps)
        around = np.zeros(len(gaps), dtype=bool)
        for moment_s in hurt_s:
            around |= (ends > moment_s) & (ends - gaps < moment_s + 2.0)
        elsewhere = gaps[10:][~around[10:]]
        assert around.sum() > 20
        assert len(elsewhere) > 20
        limit_s = max(10 * np.median(elsewhere), 3 * elsewhere.max())
        assert gaps[around].max() <= limit_s, f"{member} paused {gaps[around].max():.3f} s, limit {limit_s:.3f} s"


def assert_lost_once(result: Any, learner_id: int) -> None:
    assert result.stderr.count(f"learner {learner_id} is lost") == 1, str(result)


# ------------------------------------------------------------------------------------------------- killed learners


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3, 4))])
def test_world_learners_killed_at_random_others_lose_no_step(start_job: StartJob, tmp_path, seed):
    random_ = random.Random(seed)
    victims = random_.sample(range(4), 2)
    survivors = [(m, 0) for m in range(4) if m not in victims]
    run = Run(start_job, tmp_path, 4, [FAR, "sync.quorum=2", "sync.interval=6", "test.step_s=0.02"])
    run.wait_until_attached()
    run.wait_for_steps(60)
    killed_s = []
    for victim in victims:
        time.sleep(random_.uniform(0, 0.3))
        killed_s.append(time.monotonic())
        run.job.kill_rank(1 + victim)
        run.wait_for_merges(6, lambda e, victim=victim: victim not in e["merged"] and len(e["merged"]) >= 2)
        run.wait_for_more_steps(100, survivors)
    result = run.stop()
    assert_no_step_lost(run, survivors, *killed_s)
    for victim in victims:
        assert_lost_once(result, victim)
    run.assert_ended_in_order(result, survivors)
    assert {e["learner_id"] for e in run.events("LearnerLost") if e["reason"] != "it left"} == set(victims)
    assert result.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_world_one_rank_of_two_killed_its_mate_ends_and_the_others_go_on(start_job: StartJob, tmp_path, seed):
    random_ = random.Random(seed)
    victim = random_.choice([0, 1])  # of learner 0, world ranks 1 and 2
    words = [FAR, "run.ranks=2", "sync.quorum=1", "sync.interval=6", "test.step_s=0.02"]
    run = Run(start_job, tmp_path, 2, words)
    run.wait_until_attached()
    run.wait_for_steps(50)
    time.sleep(random_.uniform(0, 0.3))
    killed_s = time.monotonic()
    run.job.kill_rank(1 + victim)
    run.wait_for(lambda: not run.job.pids_of_rank(2 - victim), "the end of the mate", 20)
    mate_ended_s = time.monotonic() - killed_s
    run.wait_for_merges(6, lambda e: e["merged"] == [1])
    run.wait_for_more_steps(100, [(1, 0)])
    result = run.stop()
    assert_no_step_lost(run, [(1, 0), (1, 1)], killed_s)
    assert_lost_once(result, 0)
    run.assert_ended_in_order(result, [(1, 0), (1, 1)])
    assert re.search(rf"rank {1 - victim} of 2 waits for .*, but .*", result.stderr), str(result)
    assert mate_ended_s < 15  # far below timeouts.group_s, which is 60


def test_world_learners_that_fail_in_every_way_others_go_on(start_job: StartJob, tmp_path):
    faults = ["exception", "exit", "segv"]
    words = [FAR, "sync.quorum=1", "sync.interval=6", "test.step_s=0.02", "test.at_step=60"]
    words += [f"{rank}:test.fault={fault}" for rank, fault in enumerate(faults, start=1)]
    run = Run(start_job, tmp_path, 4, words)
    run.wait_until_attached()
    run.wait_for(lambda: len(run.events("LearnerLost")) == 3, "the loss of three learners")
    run.wait_for_merges(6, lambda e: e["merged"] == [3])
    result = run.stop()
    run.assert_ended_in_order(result, [(3, 0)])
    for learner_id in range(3):
        assert_lost_once(result, learner_id)
        assert len(run.steps((learner_id, 0))) == 60
    assert "the test's exception" in result.stderr
    first_loss_s = min(run.steps((m, 0))[-1, 0] for m in range(3))
    assert_no_step_lost(run, [(3, 0)], first_loss_s)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_world_learner_killed_while_the_run_ends_the_end_is_in_order(start_job: StartJob, tmp_path, seed):
    random_ = random.Random(seed)
    run = Run(start_job, tmp_path, 3, [FAR, "sync.interval=6", "test.step_s=0.02", "timeouts.drain_s=5"])
    run.wait_until_attached()
    run.wait_for_steps(40)
    run.job.kill_rank(0, signal.SIGTERM)
    time.sleep(random_.uniform(0, 0.4))
    victim = random_.randrange(3)
    pids = run.job.pids_of_rank(1 + victim)
    if pids:
        os.kill(pids[0], signal.SIGKILL)
    result = run.end()
    run.assert_ended_in_order(result, [(m, 0) for m in range(3) if m != victim])


def test_world_syncer_killed_learners_train_on_then_save_and_the_run_can_be_resumed(start_job: StartJob, tmp_path):
    words = ["sync.interval=6", "test.step_s=0.02", "run.checkpoint_every_merges=4"]
    run = Run(start_job, tmp_path, 2, [FAR, "timeouts.syncer_s=4", *words])
    run.wait_until_attached()
    run.wait_for(lambda: run.events("CheckpointWritten"), "a checkpoint")
    killed_s = time.monotonic()
    run.job.kill_rank(0)
    result = run.end()
    for member in run.members:
        steps = run.steps(member)
        after = steps[steps[:, 0] > killed_s]
        assert after[-1, 0] - killed_s > 3  # it trained on as long as timeouts.syncer_s allows
        assert np.median(np.diff(after[:, 0])) <= 1.3 * np.median(durations(steps))
        assert (tmp_path / "run" / f"learner-{member[0]}.h5").exists()
    assert result.stderr.count("the syncer must answer within 4 s") == 2, str(result)
    assert "Traceback" not in result.stderr, str(result)
    resumed_at = run.checkpoint().step
    run = Run(start_job, tmp_path, 2, [f"run.max_steps={resumed_at + 20}", "run.resume=true", *words])
    result = run.end()
    assert result.returncode == 0, str(result)
    assert f"resuming at step {resumed_at}" in result.stderr
    run.checkpoint()


def test_world_nan_in_a_learner_is_refused_counted_named_and_never_merged(start_job: StartJob, tmp_path):
    words = [FAR, "sync.quorum=1", "sync.interval=6", "2:test.fault=nan", "test.at_step=40", "test.step_s=0.02"]
    run = Run(start_job, tmp_path, 2, words)
    run.wait_until_attached()
    run.wait_for(lambda: len([e for e in run.events("Reject") if e["cause"] == "not finite"]) >= 3, "three refusals")
    run.wait_for_merges(6)
    result = run.stop()
    run.assert_ended_in_order(result, [(0, 0), (1, 0)])  # the checkpoint's values are finite
    refused = [e for e in run.events("Reject") if e["cause"] == "not finite"]
    assert {e["learner_id"] for e in refused} == {1}
    (end,) = run.events("Result")
    assert end["rejected"]["not finite"] == len(refused)
    assert result.stderr.count("learner 1: a contribution is refused (not finite)") == 1, str(result)
    assert np.isfinite(np.load(tmp_path / "final-0-0.npy")).all()


# ------------------------------------------------------------------------------------------------ stopped processes


def stop_syncer(run: Run, seconds: float) -> tuple[float, float]:
    """Stop the syncer's process for a time; returns from when to when on time.monotonic's clock."""
    pid = run.job.kill_rank(0, signal.SIGSTOP)
    stopped_s = time.monotonic()
    time.sleep(seconds)
    continued_s = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    return stopped_s, continued_s


def assert_steps_as_fast_inside(run: Run, stopped_s: float, continued_s: float) -> None:
    for member in run.members:
        steps = run.steps(member)
        ends, gaps = steps[1:, 0], durations(steps)
        before = gaps[(ends < stopped_s)][-200:]
        inside = gaps[(ends > stopped_s + 0.1) & (ends < continued_s)]
        assert inside.sum() >= 0.9 * (continued_s - stopped_s - 0.2), "steps were made all the time"
        assert np.median(inside) <= 1.3 * np.median(before)
        assert inside.max() <= max(20 * np.median(before), 2 * before.max())


@pytest.mark.parametrize(
    ("ranks", "tcp", "seconds"),
    [
        pytest.param(2, True, 3, id="two ranks, tcp, short"),
        pytest.param(1, False, 10, id="one rank, shared memory", marks=pytest.mark.slow),
        pytest.param(1, True, 10, id="one rank, tcp", marks=pytest.mark.slow),
        pytest.param(2, False, 10, id="two ranks, shared memory", marks=pytest.mark.slow),
        pytest.param(2, True, 10, id="two ranks, tcp", marks=pytest.mark.slow),
    ],
)
def test_world_syncer_stopped_learners_train_on_as_fast(start_job: StartJob, tmp_path, ranks, tcp, seconds):
    words = [FAR, f"run.ranks={ranks}", "sync.interval=6", "test.step_s=0.02", "timeouts.stall_s=2"]
    run = Run(start_job, tmp_path, 2, words, tcp=tcp)
    run.wait_until_attached()
    run.wait_for_steps(100)
    run.wait_for_merges(4)
    stopped_s, continued_s = stop_syncer(run, seconds)
    run.wait_for_merges(8, lambda e: len(e["merged"]) == 2)
    result = run.stop()
    assert_steps_as_fast_inside(run, stopped_s, continued_s)
    run.assert_ended_in_order(result, run.members)
    assert result.returncode == 0


def test_world_learner_stopped_is_silent_then_back_and_merged_again(start_job: StartJob, tmp_path):
    words = [FAR, "sync.interval=6", "test.step_s=0.02", "timeouts.heartbeat_s=1"]
    run = Run(start_job, tmp_path, 2, words)
    run.wait_until_attached()
    run.wait_for_steps(60)
    pid = run.job.kill_rank(2, signal.SIGSTOP)
    stopped_s = time.monotonic()
    run.wait_for(lambda: run.events("LearnerSilent"), "learner 1 being silent")
    run.wait_for_merges(6, lambda e: e["merged"] == [0])
    run.wait_for_more_steps(100, [(0, 0)])
    os.kill(pid, signal.SIGCONT)
    run.wait_for_merges(8, lambda e: e["merged"] == [0, 1])
    result = run.stop()
    assert_no_step_lost(run, [(0, 0)], stopped_s)
    assert result.stderr.count("learner 1 is silent") == 1
    assert result.stderr.count("learner 1 is back") == 1
    assert "is lost" not in result.stderr
    run.assert_ended_in_order(result, run.members)
    assert result.returncode == 0


def test_world_whole_job_stopped_and_continued_goes_on(start_job: StartJob, tmp_path):
    limits = ["timeouts.heartbeat_s=2", "timeouts.group_s=3", "timeouts.syncer_s=3", "timeouts.stall_s=1"]
    run = Run(start_job, tmp_path, 1, [FAR, "run.ranks=2", "sync.interval=6", "test.step_s=0.02", *limits])
    run.wait_until_attached()
    run.wait_for_steps(60)
    pids = [run.job.pids_of_rank(rank)[0] for rank in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)  # longer than every limit
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.wait_for_merges(8)
    result = run.stop()
    run.assert_ended_in_order(result, run.members)
    assert result.returncode == 0, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_world_syncer_killed_over_tcp_no_rank_hangs(start_job: StartJob, tmp_path, netmod):
    # MPICH over ucx aborts the learners; over ofi it never returns from a call: either way the end must come.
    limits = ["timeouts.group_s=4", "timeouts.syncer_s=6", "timeouts.stall_s=2"]
    words = [FAR, "run.ranks=2", "sync.interval=6", "test.step_s=0.02", *limits]
    run = Run(start_job, tmp_path, 2, words, tcp=True, netmod=netmod)
    run.wait_until_attached()
    run.wait_for_steps(60)
    run.job.kill_rank(0)
    killed_s = time.monotonic()
    result = run.end()
    assert result.returncode != 0
    assert time.monotonic() - killed_s < 40


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "size", "sentence"),
    [
        pytest.param(["3:test.fault=buffer"], 4, r"learner 2 differs from learner 0", id="another layout"),
        pytest.param(["2:sync.quorum=2"], 3, r"sync.quorum is 1 at .* and 2 at learner 1", id="another configuration"),
        pytest.param(["run.ranks=2"], 4, r"1 \+ M \* 2 ranks for some number M .*; got 4", id="size does not fit"),
        pytest.param(["run.learners=3"], 3, r"1 \+ M \* G = 1 \+ 3 \* 1 = 4 .*; got 3", id="size is another"),
        pytest.param(["sync.quorum=3"], 3, r"sync.quorum \(K\) must be at most .*2; got 3", id="quorum too large"),
        pytest.param(["1:run.ranks=2"], 3, r"all ranks must be given the same run.ranks", id="ranks disagree"),
    ],
)
def test_world_what_does_not_fit_is_refused_with_a_sentence(start_job: StartJob, tmp_path, words, size, sentence):
    run = Run(start_job, tmp_path, 0, [FAR, *words], size=size)
    result = run.end()
    assert re.search(sentence, result.stderr), str(result)
    assert "Traceback" not in result.stderr, str(result)
    assert result.returncode == 2, str(result)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_world_folder_in_use_is_refused_with_pid_of_the_other(start_job: StartJob, tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    try:
        result = Run(start_job, tmp_path, 0, [FAR], size=2).end()
    finally:
        lock.release()
    assert result.returncode == 2, str(result)
    assert str(os.getpid()) in result.stderr
    assert "Traceback" not in result.stderr, str(result)


# ------------------------------------------------------------------------------------------- signals, resume, disk


def test_world_resume_after_sigusr1_goes_on_where_it_was(start_job: StartJob, tmp_path):
    """One learner in lock-step is plain training, so that its trajectory can be compared with that."""
    words = ["sync.lockstep_steps=1000000", "sync.interval=4", "test.step_s=0.002"]
    run = Run(start_job, tmp_path, 1, [FAR, *words])
    run.wait_until_attached()
    run.wait_for_steps(40)
    os.kill(run.job.launcher_pid, signal.SIGUSR1)
    result = run.end()
    assert result.returncode == 0, str(result)
    assert result.stderr.count("stopping: signal SIGUSR1") == 1, str(result)
    run.assert_ended_in_order(result, [(0, 0)])
    first = run.checkpoint().step
    assert len(run.steps((0, 0))) == first >= 40
    assert_is_plain_training(tmp_path, first)

    again = Run(start_job, tmp_path, 0, [FAR, *words], size=2, survivable=False).end()
    assert again.returncode == 2, str(again)
    assert re.search(r"holds checkpoints: resume it \(run.resume=true\)", again.stderr), str(again)

    last = first + 30
    run = Run(start_job, tmp_path, 1, [f"run.max_steps={last}", "run.resume=true", *words])
    result = run.end()
    assert result.returncode == 0, str(result)
    assert f"resuming at step {first} from checkpoint-{first:010d}.h5" in result.stderr
    assert f"learner 0-0 attached at step {first}" in result.stdout
    assert f"learner 0-0 done steps 30 cursor {last}" in result.stdout
    assert_is_plain_training(tmp_path, last)


def assert_is_plain_training(folder: Path, num_steps: int) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})
import numpy as np, torch
from train import Batches, inner_step, make_model
torch.set_num_threads(1)
model, optimizer = make_model()
for _, batch in zip(range({num_steps}), Batches(0, 0)):
    inner_step(model, optimizer, batch)
plain = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
found = np.load({str(folder / "final-0-0.npy")!r})
print(np.abs(found - plain).max() / np.abs(plain - make_plain()).max() if False else np.abs(found - plain).max())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def test_world_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(start_job: StartJob, tmp_path):
    words = ["run.checkpoint_every_merges=6", "sync.interval=6"]
    run = Run(start_job, tmp_path, 1, ["run.max_steps=60", *words])
    assert run.end().returncode == 0
    older, newest = sorted((tmp_path / "run").glob("checkpoint-*.h5"))[-2:]
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    newest.write_bytes(raw)
    run = Run(start_job, tmp_path, 1, ["run.max_steps=90", "run.resume=true", *words])
    result = run.end()
    assert result.returncode == 0, str(result)
    assert newest.name in result.stderr
    assert re.search(rf"resuming at step \d+ from {older.name}", result.stderr), str(result)
    assert run.checkpoint().step == 90


def test_world_full_disk_training_goes_on_with_a_warning(start_job: StartJob, tmp_path):
    run = Run(start_job, tmp_path, 2, [FAR, "sync.interval=6", "run.checkpoint_every_merges=8"])
    run.wait_until_attached()
    run.wait_for(lambda: run.events("CheckpointWritten"), "a checkpoint")
    pid = run.job.pids_of_rank(0)[0]
    # From now on no file of the syncer can grow beyond 4 KiB: neither the tape nor a new checkpoint.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    run.wait_for(lambda: "warning" in run.job.stderr, "a warning")
    run.wait_for_more_steps(100, run.members)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.wait_for_merges(8)
    result = run.stop()
    assert result.returncode == 0, str(result)
    assert re.search(r"warning: .*; training goes on", result.stderr), str(result)
    assert run.events("lines_lost")
    run.assert_ended_in_order(result, run.members)


def test_world_disk_full_at_the_end_is_said_and_no_success(start_job: StartJob, tmp_path):
    run = Run(start_job, tmp_path, 2, [FAR, "sync.interval=6"])
    run.wait_until_attached()
    run.wait_for_merges(2)
    resource.prlimit(run.job.pids_of_rank(0)[0], resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    result = run.stop()
    assert result.returncode != 0, str(result)
    assert "the end of the run is not on disk" in result.stderr, str(result)
    assert "the model is in" not in result.stderr
    assert "training goes on" not in result.stderr
    for m, g in run.members:
        assert f"learner {m}-{g} done" in result.stdout, str(result)


@pytest.mark.parametrize("survivable", [True, False])
def test_world_disk_that_hangs_at_the_end_is_given_up_and_nobody_is_left(start_job: StartJob, tmp_path, survivable):
    words = [FAR, "sync.interval=6", "0:test.fault=hung_disk", "timeouts.save_s=5"]
    run = Run(start_job, tmp_path, 2, words, survivable=survivable)
    run.wait_until_attached()
    run.wait_for_merges(2)
    run.job.kill_rank(0, signal.SIGTERM)
    run.wait_for(lambda: run.events("Finish"), "the end")
    touched_s = (tmp_path / "run" / "run.lock").stat().st_mtime
    run.wait_for(
        lambda: (tmp_path / "run" / "run.lock").stat().st_mtime > touched_s + 1.0, "a lock that is kept fresh meanwhile"
    )
    result = run.end()
    assert result.returncode != 0, str(result)
    assert result.stderr.count("the last checkpoint must be written within 5 s (timeouts.save_s) and was not") == 1
    for m, g in run.members:
        assert f"learner {m}-{g} done" in result.stdout, str(result)
        assert (tmp_path / "run" / f"learner-{m}.h5").exists(), "a learner's own disk did not hang"
    assert [e["kind"] for e in run.events("CheckpointFailed")] == ["CheckpointFailed"]


# ------------------------------------------------------------------------------------------------------ the set-up

ABSENT = """
import os, sys, time
if os.environ["PMI_RANK"] == "2":
    time.sleep(1)
    sys.exit(3)
import pyddl
print("comes", flush=True)
pyddl.init(run={"max_steps": 100}, timeouts={"setup_s": float(sys.argv[1])})
"""


@pytest.mark.parametrize("survivable", [True, False])
def test_world_rank_that_never_comes_into_mpi_ends_the_others_with_a_sentence(start_job: StartJob, survivable):
    """MPI_Init keeps the interpreter's lock: no thread of Python could end it."""
    job = start_job([*mpich_command(3, survivable=survivable), sys.executable, "-c", ABSENT, "5"])
    result = job.wait(END_S)
    assert result.returncode != 0
    assert "all ranks must come into MPI within 5 s; another has not come" in result.stderr, str(result)
    assert "timeouts.setup_s" in result.stderr
    assert job.processes() == []


@pytest.mark.parametrize("survivable", [True, False])
def test_world_ctrl_c_while_a_rank_is_waited_for_in_mpi_ends_all_at_once(start_job: StartJob, survivable):
    job = start_job([*mpich_command(3, survivable=survivable), sys.executable, "-c", ABSENT, "600"])
    job.wait_for_output("comes", SETUP_S, count=2)
    time.sleep(3)  # rank 2 is gone, the others are in MPI_Init
    job.interrupt()
    result = job.wait(20)
    assert result.returncode != 0, str(result)
    assert job.processes() == []


FORGETFUL = """
import sys, torch, pyddl
session = pyddl.init(run={"max_steps": 6}, sync={"interval": 2})
model = torch.nn.Linear(2, 1)
learner = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
while learner.running:
    learner.step(tokens=1)
if sys.argv[1] == "mistake":
    learner.step(tokens=0)
if sys.argv[1] == "close":
    learner.close()
"""


@pytest.mark.parametrize("ending", ["", "mistake", "close"])
def test_world_learner_that_ends_without_close_is_told_so(start_job: StartJob, ending):
    job = start_job([*mpich_command(2, survivable=True), sys.executable, "-c", FORGETFUL, ending])
    result = job.wait(END_S)
    assert ("learner 0 rank 0 ended without learner.close()" in result.stderr) == (ending == ""), str(result)
    assert ("must be an integer of at least 1; got 0" in result.stderr) == (ending == "mistake"), str(result)
    assert "Traceback" not in result.stderr, str(result)
    assert job.processes() == []


# -------------------------------------------------------------------------------------------------- use of the CPU


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_world_that_waits_costs_little_cpu(start_job: StartJob, tmp_path):
    # Rank 1 of the learner is slow, so rank 0 waits in average_gradients() most of the time.
    run = Run(start_job, tmp_path, 1, [FAR, "run.ranks=2", "1:test.step_s=0", "2:test.step_s=0.5"])
    run.wait_until_attached()
    run.wait_for_steps(3)
    pids = [run.job.pids_of_rank(rank)[0] for rank in range(3)]
    before = [cpu_s(pid) for pid in pids]
    started_s = time.monotonic()
    time.sleep(3)
    shares = [(cpu_s(pid) - b) / (time.monotonic() - started_s) for pid, b in zip(pids, before, strict=True)]
    run.stop()
    assert shares[0] < 0.15, f"the syncer took {shares[0]:.0%} of a core"
    assert shares[1] < 0.25, f"a rank that waits took {shares[1]:.0%} of a core"
    assert shares[2] < 0.15, f"a learner whose device works took {shares[2]:.0%} of a core"


# ------------------------------------------------------------------------------------------------- another MPI


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_world_open_mpi_with_ulfm_learner_killed_others_go_on(start_job: StartJob, tmp_path, ranks):
    python = openmpi_python()
    command = [*openmpi_command(1 + 3 * ranks), python, "-m", "pyddl.run.guard", python]
    words = [FAR, f"run.ranks={ranks}", "sync.interval=6", "test.step_s=0.02"]
    run = Run(start_job, tmp_path, 3, words, command=command)
    survivors = [member for member in run.members if member[0] != 1]
    run.wait_until_attached()
    run.wait_for_steps(60)
    killed_s = time.monotonic()
    run.job.kill_rank(2 * ranks)  # of learner 1 its only rank, or the second
    run.wait_for_merges(6, lambda e: e["merged"] == [0, 2])
    run.wait_for_more_steps(100, survivors)
    result = run.stop()
    assert_no_step_lost(run, survivors, killed_s)
    assert_lost_once(result, 1)
    run.assert_ended_in_order(result, survivors)
