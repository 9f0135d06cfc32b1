"""Runs of ``pyddl train`` in world mode, started and disturbed from outside.

Here: starting a world, reading its tape while it runs, finding a learner's process. Not here: figures.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyddl.store.trace import read_trace

POLL_S = 0.05


class Tape:
    """A run's event tape, read on as it grows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._num_read = 0
        self._next_s = 0.0
        self.pids: dict[int, int] = {}  # learner_id -> process of its rank 0
        self.tokens = 0

    def read(self) -> None:
        """Take in what is new, at most twice a second."""
        now = time.monotonic()
        if now < self._next_s or not self._path.exists():
            return
        self._next_s = now + 0.5
        for number, event in enumerate(read_trace(self._path)):
            if number < self._num_read:
                continue
            self._num_read = number + 1
            if event["kind"] == "LearnerJoined":
                self.pids[event["learner_id"]] = event["processes"][0][0]
            elif event["kind"] == "Sample":
                self.tokens = max(self.tokens, sum(x["tokens"] for x in event["learners"].values()))


def run_world(
    words: list[str],
    num_ranks: int,
    folder: Path,
    disturb: Callable[[Tape], None] | None = None,
    *,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run ``mpiexec -n num_ranks pyddl train words`` to its end.

    Args:
        words: settings; ``run.dir`` is added.
        num_ranks: of the world, the syncer included.
        folder: of the run.
        disturb: called about twenty times a second with the tape.
        quiet: throw the run's own output away unless it fails.

    Returns: the events of its tape.

    Raises: SystemExit if the run did not come to its end.
    """
    binaries = Path(sys.executable).parent
    mpiexec = shutil.which("mpiexec", path=str(binaries)) or "mpiexec"
    command = [mpiexec, "-n", str(num_ranks), str(binaries / "pyddl"), "train", *words, f"run.dir={folder}"]
    if not quiet:
        print("$", " ".join(command), file=sys.stderr, flush=True)
    log = tempfile.TemporaryFile() if quiet else None
    world = subprocess.Popen(
        command, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=log, stderr=subprocess.STDOUT if quiet else None
    )
    tape = Tape(folder)
    try:
        while world.poll() is None:
            if disturb is not None:
                tape.read()
                disturb(tape)
            time.sleep(POLL_S)
    except BaseException:
        world.send_signal(signal.SIGTERM)
        world.wait(60)
        raise
    said = ""
    if log is not None:
        log.seek(0)
        said = log.read().decode(errors="replace")
        log.close()
    events = list(read_trace(folder / "events.jsonl")) if (folder / "events.jsonl").exists() else []
    if not any(e["kind"] == "Result" for e in events):
        raise SystemExit(f"{said}\nthe run did not come to its end; see its output above: {' '.join(command)}")
    return events


def result_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the syncer wrote at the end."""
    return next(e for e in reversed(events) if e["kind"] == "Result")


class Kill:
    """Disturbance: SIGKILL to a learner once so many tokens are processed."""

    def __init__(self, learner_id: int, after_tokens: int) -> None:
        self.learner_id = learner_id
        self.after_tokens = after_tokens
        self.done = False

    def __call__(self, tape: Tape) -> None:
        """Strike when it is time to."""
        pid = tape.pids.get(self.learner_id)
        if not self.done and pid is not None and tape.tokens >= self.after_tokens:
            print(f"SIGKILL to learner {self.learner_id} (pid {pid})", file=sys.stderr, flush=True)
            self.done = True
            with contextlib.suppress(ProcessLookupError):  # the run has ended before
                os.kill(pid, signal.SIGKILL)


class HalfSpeed:
    """Disturbance: a learner is stopped half of the time, in slices shorter than any timeout."""

    SLICE_S = 0.2

    def __init__(self, learner_id: int) -> None:
        self.learner_id = learner_id
        self._stopped = False
        self._next_s = 0.0

    def __call__(self, tape: Tape) -> None:
        """Stop or continue it when its slice is over."""
        pid, now = tape.pids.get(self.learner_id), time.monotonic()
        if pid is None or now < self._next_s:
            return
        self._next_s = now + self.SLICE_S
        self._stopped = not self._stopped
        try:
            os.kill(pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)
        except ProcessLookupError:
            pass
