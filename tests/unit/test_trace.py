"""The event tape: every whole line is read back, whatever killed or starved the writer."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyddl.errors import ConfigError
from pyddl.store.trace import Trace, read_trace


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass(frozen=True)
class Contribution:
    learner_id: int
    weight: np.float32
    color: Color


def kinds(path: Path) -> list[str]:
    return [line["kind"] for line in read_trace(path)]


def test_trace_written_and_closed_reads_back_in_order(tmp_path: Path) -> None:
    now = [100.0]
    with Trace(tmp_path / "events.jsonl", fields={"role": "syncer"}, clock=lambda: now[0]) as trace:
        now[0] += 2.5
        trace.write("round_opened", round=1, fragment=0)
        now[0] += 1.0
        trace.write("merged", contributors=[0, 2])
    lines = list(read_trace(tmp_path / "events.jsonl"))
    assert lines[0].pop("wall").endswith("+00:00")
    assert lines == [
        {"kind": "run_opened", "time_s": 0.0, "pid": os.getpid(), "role": "syncer"},
        {"kind": "round_opened", "time_s": 2.5, "round": 1, "fragment": 0},
        {"kind": "merged", "time_s": 3.5, "contributors": [0, 2]},
    ]


def test_trace_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Trace(None, fields={"role": "syncer"}) as trace:
        trace.write("merged")
    assert trace.num_lost == 0
    assert list(tmp_path.iterdir()) == []


def test_trace_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    trace.write("merged", round=7)
    assert json.loads((tmp_path / "t.jsonl").read_bytes().splitlines()[-1])["round"] == 7
    trace.close()


def test_trace_odd_values_become_plain_json(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.write(
            "odd",
            scalar=np.int64(5),
            real=np.float32(0.5),
            array=np.arange(3, dtype=np.uint8),
            flag=np.bool_(True),
            pair=(1, 2),
            several={3, 1},
            color=Color.RED,
            level=Level.HIGH,
            record=Contribution(1, np.float32(2.0), Color.RED),
            path=Path("a") / "b",
            text="λ\n\ud800",
        )
        trace.write("keys", by_learner={0: 1.0, np.int64(1): Color.RED}, record={Color.RED: (np.float32(1),)})
        trace.write("unknown", what=object)
    _, odd, keys, unknown = read_trace(tmp_path / "t.jsonl")
    assert odd == {
        "kind": "odd",
        "time_s": odd["time_s"],
        "scalar": 5,
        "real": 0.5,
        "array": [0, 1, 2],
        "flag": True,
        "pair": [1, 2],
        "several": [1, 3],
        "color": "red",
        "level": 3,
        "record": {"learner_id": 1, "weight": 2.0, "color": "red"},
        "path": "a/b",
        "text": "λ\n\ud800",
    }
    assert keys["by_learner"] == {"0": 1.0, "1": "red"}
    assert keys["record"] == {"red": [1.0]}
    assert unknown["what"] == repr(object)


def test_trace_not_finite_numbers_stay_valid_json_that_float_reads(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.write("bad", loss=float("nan"), norms=[np.float64("inf"), np.float32("-inf")], ok=1.5, none=None)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = (tmp_path / "t.jsonl").read_text().splitlines()[-1]
    line = json.loads(text, parse_constant=refuse)
    assert line["loss"] == "nan"
    assert [float(x) for x in line["norms"]] == [float("inf"), float("-inf")]
    assert (line["ok"], line["none"]) == (1.5, None)


def test_trace_given_its_own_field_names_is_refused(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        with pytest.raises(TypeError, match="another name"):
            trace.write("merged", time_s=3.0)
        trace.write("merged")
    assert kinds(tmp_path / "t.jsonl") == ["run_opened", "merged"]


def test_trace_in_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/t\.jsonl.*create its folder"):
        Trace(tmp_path / "missing" / "t.jsonl")
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        read_trace(tmp_path / "nothing.jsonl")


def test_read_trace_torn_at_every_byte_yields_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Trace(path) as trace:
        trace.write("a", text="x" * 5)
        trace.write("b", round=2)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        reader = read_trace(path)
        found = list(reader)
        # A line that lacks nothing but its newline is whole.
        num_whole = sum(end - 1 <= size for end in ends)
        assert len(found) == num_whole, size
        torn = size not in (0, *ends, *(end - 1 for end in ends))
        assert reader.num_torn == int(torn), size


def test_trace_continued_after_a_torn_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Trace(path, fields={"incarnation": 1}) as trace:
        trace.write("a")
        trace.write("torn", text="0123456789")
    os.truncate(path, path.stat().st_size - 8)
    with Trace(path, fields={"incarnation": 2}) as trace:
        trace.write("b")
    reader = read_trace(path)
    lines = list(reader)
    assert [line["kind"] for line in lines] == ["run_opened", "a", "run_opened", "b"]
    assert [line.get("incarnation") for line in lines] == [1, None, 2, None]
    assert reader.num_torn == 1


def test_read_trace_with_zeros_and_wrong_bytes_skips_and_counts_them(tmp_path: Path) -> None:
    # A host that lost power may leave blocks of zeros.
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"kind":"a"}\n' + b"\0" * 50 + b'\n\xff\xfe\n[1]\n17\n{"kind":"b"}\n')
    reader = read_trace(path)
    assert [line["kind"] for line in reader] == ["a", "b"]
    assert reader.num_torn == 4


def test_read_trace_left_half_read_closes_its_file(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.write("a")
    num_open = len(os.listdir("/proc/self/fd"))
    reader = read_trace(tmp_path / "t.jsonl")
    next(reader)
    unread = read_trace(tmp_path / "t.jsonl")
    del reader, unread
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_trace_written_by_threads_keeps_lines_whole_and_times_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Trace(path) as trace:

        def work(learner_id: int) -> None:
            for i in range(100):
                trace.write("step", learner_id=learner_id, i=i, text="x" * 200)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reader = read_trace(path)
    lines = list(reader)[1:]
    assert reader.num_torn == 0
    assert len(lines) == 400
    times = [line["time_s"] for line in lines]
    assert times == sorted(times)
    for k in range(4):
        assert [line["i"] for line in lines if line["learner_id"] == k] == list(range(100))


@pytest.fixture
def full_disk(tmp_path: Path):
    """Return a function that lets no file of this process grow beyond so many bytes: a full disk."""
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old[0] if num_bytes is None else num_bytes, old[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, old_handler)


def test_trace_on_a_full_disk_warns_once_counts_and_recovers(
    tmp_path: Path, full_disk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    trace = Trace(path, retry_s=0.0)
    trace.write("a")
    with caplog.at_level(logging.INFO, logger="pyddl.store.trace"):
        full_disk(path.stat().st_size + 10)  # the next line goes in by 10 bytes
        for i in range(5):
            trace.write("lost", i=i)
        full_disk(None)
        trace.write("b")
        trace.write("c")
    trace.close()
    assert len(caplog.records) == 2, caplog.text
    assert "File too large" in caplog.records[0].message
    assert "5 were lost" in caplog.records[1].message
    reader = read_trace(path)
    lines = list(reader)
    assert [line["kind"] for line in lines] == ["run_opened", "a", "lines_lost", "b", "c"]
    assert lines[2]["count"] == 5
    times = [line["time_s"] for line in lines]
    assert times == sorted(times)
    assert reader.num_torn == 1
    assert trace.num_lost == 5


def test_trace_on_a_full_disk_tries_again_only_after_retry_s(tmp_path: Path, full_disk) -> None:
    path = tmp_path / "t.jsonl"
    trace = Trace(path, retry_s=0.05)
    full_disk(path.stat().st_size)
    trace.write("lost")
    full_disk(None)
    trace.write("too soon")
    time.sleep(0.06)
    trace.write("b")
    trace.close()
    lines = list(read_trace(path))
    assert [line["kind"] for line in lines] == ["run_opened", "lines_lost", "b"]
    assert lines[1]["count"] == 2


def test_trace_opened_on_a_full_disk_writes_its_header_later(tmp_path: Path, full_disk) -> None:
    path = tmp_path / "t.jsonl"
    full_disk(0)
    trace = Trace(path, fields={"role": "syncer"}, retry_s=0.0)
    trace.write("lost")
    full_disk(None)
    trace.write("b")
    trace.close()
    lines = list(read_trace(path))
    assert [line["kind"] for line in lines] == ["run_opened", "lines_lost", "b"]
    assert lines[0]["role"] == "syncer"
    assert lines[1]["count"] == 1


def test_trace_closed_with_lines_unreported_reports_them(tmp_path: Path, full_disk) -> None:
    path = tmp_path / "t.jsonl"
    trace = Trace(path, retry_s=3600.0)
    full_disk(path.stat().st_size)
    trace.write("lost")
    full_disk(None)
    trace.close()
    assert kinds(path) == ["run_opened", "lines_lost"]


def test_trace_written_after_close_warns_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    trace.close()
    trace.close()
    trace.write("late")
    trace.write("later")
    assert [record.message.count("closed") for record in caplog.records] == [1]
    assert trace.num_lost == 2


def test_trace_of_a_killed_process_holds_every_line_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    script = (
        "import sys, itertools\n"
        "from pyddl.store.trace import Trace\n"
        "trace = Trace(sys.argv[1])\n"
        "for i in itertools.count():\n"
        "    trace.write('step', i=i, text='x' * 300)\n"
        "    sys.stdout.write(f'{i}\\n'); sys.stdout.flush()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(50):
        process.stdout.readline()
    process.kill()
    num_reported = 50 + len(process.stdout.read().splitlines())
    process.stdout.close()
    process.wait()
    steps = [line["i"] for line in read_trace(path) if line["kind"] == "step"]
    assert steps == list(range(len(steps)))
    assert len(steps) >= num_reported
