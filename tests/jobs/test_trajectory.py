"""The trajectory of a run in which a learner is killed at a known instruction, computed by hand.

One weight, from 8; learner m has the constant gradient c_m, inner SGD has the learning rate 1/2, so in H = 4 steps it
moves by 2 c_m. In lock-step, with equal tokens, a merge by mean takes the mean of 2 c_m over whoever lives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobResult, mpich_command

from pyddl.store.checkpoint import newest_good_checkpoint
from pyddl.store.trace import read_trace

PROGRAM = str(Path(__file__).parent / "programs" / "one_weight.py")
TIMEOUT_S = 90.0
LOCKSTEP = ["run.max_steps=12", "sync.interval=4", "sync.lockstep_steps=1000", "sync.merge_rule=mean"]

StartJob = Callable[..., Job]


def reports(result: JobResult | Job) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"learner"')]
    return {line["learner"]: line for line in lines}


def tape(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_trace(folder / "events.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize(
    ("optimizer", "die_at", "contributors", "merged"),
    [
        # after its receipt of version 1: in the merge at 4, not in those at 8 and 12
        ("sgd", 4, [[0, 1, 2], [0, 1], [0, 1]], [4.0, 2.0, 2.0]),
        ("nesterov", 4, [[0, 1, 2], [0, 1], [0, 1]], [4.0, 2.0, 2.0]),
        # two steps on: what it learnt since then is lost with it, as it must be
        ("sgd", 6, [[0, 1, 2], [0, 1], [0, 1]], [4.0, 2.0, 2.0]),
        # before its first contribution
        ("nesterov", 2, [[0, 1], [0, 1], [0, 1]], [2.0, 2.0, 2.0]),
    ],
)
def test_trajectory_when_a_learner_is_killed_is_that_of_the_others(
    start_job: StartJob,
    tmp_path: Path,
    optimizer: str,
    die_at: int,
    contributors: list[list[int]],
    merged: list[float],
):
    """Gradients -1, 3 and 4 (learner 2 dies): outer gradients -2, 6, 8; mean of all 4, of the first two 2.
    SGD with lr 1: 8, then minus the merged ones. Nesterov with lr 1/2, mu 1/2: b <- b/2 + d, minus (d + b/2)/2."""
    theta, buffer, thetas = 8.0, 0.0, []
    for d in merged:
        buffer = buffer / 2 + d
        theta -= d if optimizer == "sgd" else (d + buffer / 2) / 2
        thetas.append(theta)
    outer = [f"outer.optimizer={optimizer}", *(["outer.lr=0.5", "outer.momentum=0.5"] if optimizer != "sgd" else [])]
    argv = [*mpich_command(4, survivable=True), sys.executable, PROGRAM, str(tmp_path / "run"), "SIGKILL"]
    result = start_job([*argv, "2", str(die_at), "-1,3,4", *LOCKSTEP, *outer]).wait(TIMEOUT_S)
    found = reports(result)
    assert set(found) == {0, 1}, str(result)
    for m, gradient in ((0, -1.0), (1, 3.0)):
        path = []
        weight = 8.0
        for step in range(1, 13):
            weight -= gradient / 2
            weight = thetas[step // 4 - 1] if step in (4, 8) else weight
            path.append(weight)
        assert found[m]["path"] == path, f"learner {m} lost or repeated a step"
        assert found[m]["final"] == thetas[-1]
    checkpoint, _, bad = newest_good_checkpoint(tmp_path / "run")
    assert bad == []
    assert checkpoint.fragments[0].theta.tolist() == [thetas[-1]]
    assert checkpoint.fragments[0].version == 3
    assert [
        [c["learner_id"] for c in merge["contributors"]] for merge in tape(tmp_path / "run", "Merge")
    ] == contributors
    (lost,) = tape(tmp_path / "run", "LearnerLost")
    assert lost["learner_id"] == 2
    (end,) = tape(tmp_path / "run", "Result")
    assert (end["outcome"], end["num_lost"]) == ("drained", 1)


def test_run_whose_learner_is_stopped_for_good_still_ends_in_order_for_the_others(start_job: StartJob, tmp_path: Path):
    """The end must not wait for who is silent: nobody frees a window together with it, and close() returns."""
    argv = [*mpich_command(4, survivable=True), sys.executable, PROGRAM, str(tmp_path / "run"), "SIGSTOP", "2", "5"]
    words = ["run.max_steps=60", "sync.interval=4", "timeouts.heartbeat_s=1", "timeouts.drain_s=5"]
    job = start_job([*argv, "-1,3,4", *words, "timeouts.setup_s=1000"])  # no alarm of the set-up helps
    job.wait_for_output('{"learner"', TIMEOUT_S, count=2)
    found = reports(job)
    assert set(found) == {0, 1}
    checkpoint, _, _ = newest_good_checkpoint(tmp_path / "run")
    assert [report["final"] for report in found.values()] == checkpoint.fragments[0].theta.tolist() * 2
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (ends := tape(tmp_path / "run", "Result")) and time.monotonic() < deadline_s:
        time.sleep(0.1)  # the syncer ends a little after its learners
    (end,) = ends
    assert end["outcome"] == "drained"
