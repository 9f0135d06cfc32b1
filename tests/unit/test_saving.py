"""Checkpoints beside a run: how each ends is said once, and only the last one's failure is the run's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyddl.errors import CheckpointError
from pyddl.run import saving
from pyddl.run.saving import Saver
from pyddl.store.trace import Trace, read_trace


class Disk:
    """In the place of the write to a file: fails, or does not answer until it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, folder: Path, checkpoint: Any, *, keep: int) -> Path:
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        return folder / "checkpoint.h5"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(saving, "write_checkpoint", disk)
    return disk


def saver_of(folder: Path) -> tuple[Saver, list[str], Callable[[], list[str]]]:
    """A saver, what it says, and the kinds on its tape."""
    said: list[str] = []
    trace = Trace(folder / "events.jsonl")
    return Saver(folder, 2, trace, said.append), said, lambda: [e["kind"] for e in read_trace(trace.path)][1:]


def settle(saver: Saver) -> None:
    end_s = time.monotonic() + 20
    while saver.is_writing:
        assert time.monotonic() < end_s
        saver.report()


def test_saver_writes_down_what_was_written(disk: Disk, tmp_path: Path):
    saver, said, kinds = saver_of(tmp_path)
    assert saver.save(None, last=False)
    settle(saver)
    assert saver.save(None, last=True)
    settle(saver)
    assert (said, kinds(), saver.unsaved) == ([], ["CheckpointWritten"] * 2, "")


@pytest.mark.parametrize("error", [CheckpointError("the disk is full"), MemoryError("no more")])
def test_saver_failure_is_a_warning_while_training_goes_on(error: Exception, disk: Disk, tmp_path: Path):
    saver, said, kinds = saver_of(tmp_path)
    disk.error = error
    saver.save(None, last=False)
    settle(saver)
    assert len(said) == 1
    assert str(error) in said[0]
    assert said[0].endswith("training goes on")
    assert (kinds(), saver.unsaved) == (["CheckpointFailed"], "")


def test_saver_failure_of_the_last_one_is_the_runs(disk: Disk, tmp_path: Path):
    saver, said, _kinds = saver_of(tmp_path)
    disk.error = CheckpointError("the disk is full")
    saver.save(None, last=True)
    settle(saver)
    assert saver.unsaved == "the end of the run is not on disk: the disk is full"
    assert said == [f"warning: {saver.unsaved}"]
    assert not saver.hangs


def test_saver_leaves_out_what_comes_too_soon_but_never_the_last_one(disk: Disk, tmp_path: Path):
    saver, said, kinds = saver_of(tmp_path)
    disk.answers.clear()
    assert saver.save(None, last=False)
    assert not saver.save(None, last=False)
    assert said == ["the last checkpoint is still being written; this one is left out"]
    assert saver.save(None, last=True)
    disk.answers.set()
    settle(saver)
    assert kinds() == ["CheckpointWritten"] * 2


def test_saver_that_gives_up_says_what_may_be_wrong_and_waits_no_longer(disk: Disk, tmp_path: Path):
    saver, said, _kinds = saver_of(tmp_path)
    disk.answers.clear()
    saver.save(None, last=True)
    assert saver.is_writing
    saver.give_up(5.0)
    assert not saver.is_writing
    assert saver.hangs
    assert "within 5 s (timeouts.save_s)" in saver.unsaved
    assert said == [f"warning: {saver.unsaved}"]
    saver.close()
    disk.answers.set()
