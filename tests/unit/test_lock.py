"""The lock of a run directory: one holder at a time, whoever dies and however many try at once."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyddl.errors import ConfigError
from pyddl.store.files import ProcessIdentity
from pyddl.store.lock import RunLock


def write_record(folder: Path, *, name: str = "run.lock", age_s: float = 0.0, **fields: object) -> Path:
    """Write the record of another holder: this process's identity, but for ``fields``."""
    own = ProcessIdentity.own()
    record = {
        "nonce": "0" * 32,
        "host": own.host,
        "boot_id": own.boot_id,
        "pid_namespace": own.pid_namespace,
        "pid": own.pid,
        "start_ticks": own.start_ticks,
        **fields,
    }
    path = folder / name
    path.write_text(json.dumps(record))
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_lock_acquired_and_released_leaves_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    assert files(tmp_path) == ["run.lock"]
    record = json.loads((tmp_path / "run.lock").read_text())
    assert record["pid"] == os.getpid()
    assert record["start_ticks"] > 0
    lock.release()
    lock.release()
    assert files(tmp_path) == []
    with lock:
        assert files(tmp_path) == ["run.lock"]
    assert files(tmp_path) == []


def test_lock_held_by_a_living_process_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        before = (tmp_path / "run.lock").read_bytes()
        with pytest.raises(ConfigError, match="one launch at a time") as caught:
            RunLock(tmp_path).acquire()
        message = str(caught.value)
        assert f"process {os.getpid()} on host {ProcessIdentity.own().host}" in message
        assert "end it, or choose another run.dir" in message
        assert (tmp_path / "run.lock").read_bytes() == before
    RunLock(tmp_path).acquire()


def test_lock_held_by_a_living_process_is_refused_however_old(tmp_path: Path) -> None:
    # A stopped or very slow process of this host is there, and may write at any time.
    write_record(tmp_path, age_s=9999.0)
    with pytest.raises(ConfigError, match="which is running"):
        RunLock(tmp_path).acquire()


def test_lock_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    write_record(tmp_path, pid=dead_pid())
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        assert files(tmp_path) == ["run.lock"]
    assert files(tmp_path) == []


def test_lock_of_an_earlier_process_with_a_living_pid_is_taken_over(tmp_path: Path) -> None:
    write_record(tmp_path, start_ticks=ProcessIdentity.own().start_ticks - 1)
    with RunLock(tmp_path):
        assert files(tmp_path) == ["run.lock"]


def test_lock_of_a_zombie_is_taken_over(tmp_path: Path) -> None:
    script = f"from pyddl.store.lock import RunLock; RunLock({str(tmp_path)!r}).acquire(); import os; os._exit(1)"
    child = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
    try:
        os.kill(child.pid, 0)
        with RunLock(tmp_path):
            pass
    finally:
        child.wait()


@pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_lock_of_another_host_is_taken_over_only_when_stale(tmp_path: Path, elsewhere: dict[str, object]) -> None:
    write_record(tmp_path, age_s=50.0, pid=dead_pid(), **elsewhere)
    with pytest.raises(ConfigError, match=r"refreshed (49|50|51) s ago.*60 s old, or remove .*run\.lock"):
        RunLock(tmp_path).acquire()
    assert files(tmp_path) == ["run.lock"]
    write_record(tmp_path, age_s=70.0, **elsewhere)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["host"] == ProcessIdentity.own().host


def test_lock_of_another_host_ahead_of_time_is_not_stale(tmp_path: Path) -> None:
    write_record(tmp_path, age_s=-3600.0, host="elsewhere")
    with pytest.raises(ConfigError, match="refreshed 0 s ago"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"{}", b"[]", b'{"nonce": "1", "host": "a"}'])
def test_lock_with_a_damaged_file_is_refused_until_stale(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "run.lock", (time.time() - 70, time.time() - 70))
    with RunLock(tmp_path):
        assert files(tmp_path) == ["run.lock"]


def test_lock_with_a_dead_successor_is_taken_over_from_it(tmp_path: Path) -> None:
    # The second holder died between its claim and the clean-up, and so did the third.
    write_record(tmp_path, pid=dead_pid(), nonce="a")
    write_record(tmp_path, name="run.lock.after-a", pid=dead_pid(), nonce="b")
    write_record(tmp_path, name="run.lock.after-b", pid=dead_pid(), nonce="c")
    with RunLock(tmp_path):
        assert files(tmp_path) == ["run.lock"]
        with pytest.raises(ConfigError, match="one launch"):
            RunLock(tmp_path).acquire()


def test_lock_with_a_living_successor_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, pid=dead_pid(), nonce="a")
    write_record(tmp_path, name="run.lock.after-a", pid=os.getppid(), nonce="b", host="elsewhere")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on host elsewhere"):
        RunLock(tmp_path).acquire()
    assert files(tmp_path) == before


def test_lock_claimed_behind_the_holders_back_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interleaving of the module's docstring: B reads the dead record; A takes over; B claims.
    write_record(tmp_path, pid=dead_pid(), nonce="a")
    slow, fast = RunLock(tmp_path), RunLock(tmp_path)
    create = RunLock._create

    def create_late(lock: RunLock, place: Path) -> None:
        if lock is slow:
            monkeypatch.setattr(RunLock, "_create", create)
            fast.acquire()
        create(lock, place)

    monkeypatch.setattr(RunLock, "_create", create_late)
    with pytest.raises(ConfigError, match="one launch"):
        slow.acquire()
    assert files(tmp_path) == ["run.lock"]
    fast.refresh()
    fast.release()
    assert files(tmp_path) == []


def test_lock_released_while_another_waits_to_claim_is_acquired_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, pid=dead_pid(), nonce="a")
    slow, fast = RunLock(tmp_path), RunLock(tmp_path)
    create = RunLock._create

    def create_late(lock: RunLock, place: Path) -> None:
        if lock is slow:
            monkeypatch.setattr(RunLock, "_create", create)
            fast.acquire()
            fast.release()
        create(lock, place)

    monkeypatch.setattr(RunLock, "_create", create_late)
    with slow:
        assert files(tmp_path) == ["run.lock"]
    assert files(tmp_path) == []


def test_lock_where_a_success_is_reported_as_failure_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Over NFS the answer to link(2) may be lost; the repetition then says that the name exists.
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    with RunLock(tmp_path):
        assert files(tmp_path) == ["run.lock"]


def test_lock_without_hard_links_excludes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with RunLock(tmp_path):
        assert files(tmp_path) == ["run.lock"]
        with pytest.raises(ConfigError, match="one launch"):
            RunLock(tmp_path).acquire()
    assert files(tmp_path) == []


def test_lock_refreshed_is_young_again(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        os.utime(lock.path, (1000.0, 1000.0))
        lock.refresh()
        assert abs(lock.path.stat().st_mtime - time.time()) < 5


def test_lock_taken_over_by_another_host_is_noticed_and_left_alone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    write_record(tmp_path, host="elsewhere", pid=17)
    with pytest.raises(ConfigError, match="process 17 on host elsewhere has taken its lock over"):
        lock.refresh()
    lock.release()
    assert files(tmp_path) == ["run.lock"]


def test_lock_removed_by_somebody_is_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunLock(tmp_path) as lock:
        lock.path.unlink()
        lock.refresh()
        assert "put back" in caplog.text
        with pytest.raises(ConfigError, match="one launch"):
            RunLock(tmp_path).acquire()
        lock.refresh()
    assert files(tmp_path) == []


def test_lock_refreshed_on_a_failing_file_system_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as lock:
        monkeypatch.setattr(os, "utime", refuse)
        lock.refresh()
        lock.refresh()
        assert [record.message.count("Input/output") for record in caplog.records] == [1]
        monkeypatch.undo()
        lock.refresh()


def test_lock_used_without_holding_it_is_our_own_bug(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RuntimeError, match="acquired"):
        lock.refresh()
    with lock, pytest.raises(RuntimeError, match="released"):
        lock.acquire()
    lock.release()


def test_lock_of_a_forked_child_is_its_parents(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert files(tmp_path) == ["run.lock"]
    lock.release()
    assert files(tmp_path) == []


def test_lock_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; create it"):
        RunLock(tmp_path / "missing").acquire()


CONTENDERS = """
import fcntl, os, random, sys, time
from pyddl.errors import ConfigError
from pyddl.store.lock import RunLock
folder, seed, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
random.seed(seed)
counts = {"held": 0, "refused": 0}
while time.monotonic() < until:
    read, write = os.pipe()
    dies = random.random() < 0.7
    child = os.fork()
    if child == 0:  # a new process each time, which may die with the lock
        try:
            lock = RunLock(folder)
            lock.acquire()
        except ConfigError as error:
            os.write(write, b"refused" if "one launch" in str(error) else b"other: " + str(error).encode())
            os._exit(0)
        except BaseException as error:
            os.write(write, repr(error).encode())
            os._exit(1)
        # A kernel lock on another file is the judge: it is free unless somebody else holds the lock now.
        judge = os.open(folder + "/../judge", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(judge, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.write(write, b"two holders")
            os._exit(1)
        time.sleep(random.random() * 0.001)
        os.write(write, b"held")
        if not dies:
            fcntl.flock(judge, fcntl.LOCK_UN)
            lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    word = os.read(read, 1000).decode()
    os.close(read)
    if word not in counts:
        sys.exit(word)
    counts[word] += 1
print(counts["held"], counts["refused"])
"""


def test_lock_fought_over_by_many_that_die_has_one_holder_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDERS, str(folder), str(seed), "2.0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(6)
    ]
    outputs = [contender.communicate(timeout=60) for contender in contenders]
    assert [error for _, error in outputs if error] == []
    held = sum(int(out.split()[0]) for out, _ in outputs)
    refused = sum(int(out.split()[1]) for out, _ in outputs)
    assert held > 5
    assert refused > 5
    with RunLock(folder):
        assert files(folder) == ["run.lock"]
