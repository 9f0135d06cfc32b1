"""The tape of receipts: nothing of the file system is felt by its caller."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from pathlib import Path

from pyddl.store import background as module
from pyddl.store.background import BackgroundTrace
from pyddl.store.trace import read_trace


def test_background_when_closed_all_lines_are_in_the_file_in_order(tmp_path: Path):
    receipts = BackgroundTrace(tmp_path / "r.jsonl", fields={"learner_id": 4})
    for version in range(100):
        receipts.write("Received", version=version)
    receipts.close()
    receipts.close()
    opened, *lines = read_trace(tmp_path / "r.jsonl")
    assert opened["learner_id"] == 4
    assert [line["version"] for line in lines] == list(range(100))


def test_background_file_that_takes_no_bytes_holds_nobody_up(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        monkeypatch.setattr(os, "pread", lambda *_: b"\n")  # a pipe has no end to be looked at
        receipts = BackgroundTrace(path, fields={})
        started_s = time.monotonic()
        for _ in range(200):
            receipts.write("Received", text="x" * 4096)  # far more than a pipe holds; nobody reads
        receipts.close()
        assert time.monotonic() - started_s < 5
        assert "the last lines are missing" in caplog.text
        thread = next(t for t in threading.enumerate() if t.name == "pyddl-tape")
        deadline_s = time.monotonic() + 5
        while thread.is_alive() and time.monotonic() < deadline_s:  # read, so that no thread outlives the test
            select.select([reader], [], [], 0.1)
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 20)
        assert not thread.is_alive()
    finally:
        os.close(reader)


def test_background_without_path_starts_no_thread():
    before = threading.active_count()
    receipts = BackgroundTrace(None, fields={})
    receipts.write("Received", version=1)
    assert threading.active_count() == before
    receipts.close()
