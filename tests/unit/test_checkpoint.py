"""Checkpoints: whole or absent, every flipped bit found, a bad one named and the one before it used."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import pyddl.store.checkpoint as checkpoint_module
from pyddl.core.layout import Layout, TensorSpec, build_layout
from pyddl.errors import CheckpointError, ShapeError
from pyddl.store.checkpoint import (
    Checkpoint,
    FragmentState,
    list_checkpoints,
    newest_good_checkpoint,
    read_checkpoint,
    read_learner_state,
    set_aside_after,
    write_checkpoint,
    write_learner_state,
)
from pyddl.store.files import ProcessIdentity


def make_layout() -> Layout:
    return build_layout(
        [
            TensorSpec("embed.weight", (10, 8), "float32", "embedding", aliases=("head.weight",)),
            TensorSpec("blocks.0.weight", (8, 8), "bfloat16", "parameter"),
            TensorSpec("norm.running_mean", (8,), "float32", "buffer"),
            TensorSpec("norm.num_batches", (), "int64", "counter"),
        ],
        num_fragments=2,
    )


def make_checkpoint(step: int = 7, *, momentum: bool = True, seed: int = 0) -> Checkpoint:
    random = np.random.default_rng(seed + step)
    layout = make_layout()
    states = tuple(
        FragmentState(
            version=step + fragment.index,
            theta=random.standard_normal(fragment.num_elements).astype(np.float32),
            momentum=random.standard_normal(fragment.num_elements).astype(np.float32) if momentum else None,
            counters=random.integers(-9, 9, fragment.num_counters),
        )
        for fragment in layout.fragments
    )
    protocol = {"clock": step, "rounds": [1, 2], "averages": {"0": 0.125}, "open": None, "lr": float("inf")}
    return Checkpoint(step, layout, states, protocol, '[run]\ndir = "λ"\n', {"host": "a", "ok": True})


def assert_equal(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.step, a.protocol, a.config_toml, a.meta) == (b.step, b.protocol, b.config_toml, b.meta)
    assert a.layout == b.layout
    assert a.layout.fingerprint == b.layout.fingerprint
    assert len(a.fragments) == len(b.fragments)
    for x, y in zip(a.fragments, b.fragments, strict=True):
        assert x.version == y.version
        for p, q in ((x.theta, y.theta), (x.momentum, y.momentum), (x.counters, y.counters)):
            if p is None or q is None:
                assert p is q
            else:
                assert p.dtype == q.dtype
                assert p.tobytes() == q.tobytes()


@pytest.fixture
def full_disk() -> Iterator[Callable[[int | None], None]]:
    """A function that lets no file of this process grow beyond so many bytes: a full disk."""
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old[0] if num_bytes is None else num_bytes, old[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, old_handler)


# ------------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("momentum", [True, False])
def test_checkpoint_written_reads_back_bit_equal(tmp_path: Path, momentum: bool) -> None:
    written = make_checkpoint(momentum=momentum)
    written.fragments[0].theta[:3] = np.nan, np.inf, -0.0
    path = write_checkpoint(tmp_path, written, keep=2)
    assert path == tmp_path / "checkpoint-0000000007.h5"
    assert os.listdir(tmp_path) == [path.name]
    assert_equal(read_checkpoint(path), written)


def test_checkpoint_larger_than_a_piece_reads_back_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = make_checkpoint()
    monkeypatch.setattr(checkpoint_module, "_PIECE_BYTES", 52)  # divides neither 4 nor 8 bytes evenly into rows
    in_pieces = write_checkpoint(tmp_path, written, keep=2).read_bytes()
    assert_equal(read_checkpoint(tmp_path / "checkpoint-0000000007.h5"), written)
    monkeypatch.undo()
    assert_equal(read_checkpoint(tmp_path / "checkpoint-0000000007.h5"), written)
    assert write_checkpoint(tmp_path, written, keep=2).read_bytes() == in_pieces


def test_checkpoint_with_arrays_of_another_layout_is_refused(tmp_path: Path) -> None:
    good = make_checkpoint()
    wrong_size = FragmentState(1, np.zeros(3, np.float32), None, good.fragments[0].counters)
    wrong_type = FragmentState(1, good.fragments[0].theta.astype(np.float64), None, good.fragments[0].counters)
    for fragments in ((wrong_size, good.fragments[1]), (wrong_type, good.fragments[1]), good.fragments[:1]):
        bad = Checkpoint(1, good.layout, fragments, {}, "", {})
        with pytest.raises(ShapeError, match="fragment"):
            write_checkpoint(tmp_path, bad, keep=2)
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------------- keeping


def test_write_checkpoint_keep_2_leaves_the_newest_two(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-notes.txt").write_text("mine")
    for step in (1, 5, 9, 12):
        write_checkpoint(tmp_path, make_checkpoint(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-0000000012.h5",
        "checkpoint-0000000009.h5",
    ]
    assert len(os.listdir(tmp_path)) == 3


def test_write_checkpoint_same_step_again_replaces_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_checkpoint(3), keep=2)
    write_checkpoint(tmp_path, make_checkpoint(4, seed=1), keep=2)
    path = write_checkpoint(tmp_path, make_checkpoint(4, seed=2), keep=2)
    assert_equal(read_checkpoint(path), make_checkpoint(4, seed=2))
    assert len(list_checkpoints(tmp_path)) == 2


def test_write_checkpoint_after_a_bad_later_one_keeps_two_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 100 is damaged, the run resumed from 50: the bad name may not push good ones out.
    write_checkpoint(tmp_path, make_checkpoint(50), keep=2)
    (tmp_path / "checkpoint-0000000100.h5").write_bytes(b"damaged")
    write_checkpoint(tmp_path, make_checkpoint(60), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-0000000060.h5",
        "checkpoint-0000000050.h5",
    ]
    assert (tmp_path / "checkpoint-0000000100.h5.superseded").read_bytes() == b"damaged"
    assert "later than" in caplog.text


def test_set_aside_after_leaves_room_for_good_ones_when_the_run_has_gone_beyond(tmp_path: Path) -> None:
    # 100 is damaged, the run resumed from 50 and went on to 120 before it wrote again.
    write_checkpoint(tmp_path, make_checkpoint(50), keep=2)
    (tmp_path / "checkpoint-0000000100.h5").write_bytes(b"damaged")
    _, path, bad = newest_good_checkpoint(tmp_path)
    assert len(bad) == 1
    set_aside_after(path)
    write_checkpoint(tmp_path, make_checkpoint(120), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-0000000120.h5",
        "checkpoint-0000000050.h5",
    ]
    assert (tmp_path / "checkpoint-0000000100.h5.superseded").read_bytes() == b"damaged"


def test_write_checkpoint_with_keep_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        write_checkpoint(tmp_path, make_checkpoint(), keep=0)


def test_list_checkpoints_beyond_ten_digits_sorts_by_step(tmp_path: Path) -> None:
    for name in ("checkpoint-0000000002.h5", "checkpoint-12345678901.h5", "checkpoint-2.h5", "learner-0.h5"):
        (tmp_path / name).touch()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-12345678901.h5",
        "checkpoint-0000000002.h5",
    ]
    assert list_checkpoints(tmp_path / "missing") == []


# ---------------------------------------------------------------------------------------------------- damage


def test_read_checkpoint_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    data = path.read_bytes()
    sizes = {0, 1, 7, 8, 47, 48, 49, len(data) - 1, len(data) - 2, *range(0, len(data), len(data) // 40)}
    for size in sorted(sizes):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"checkpoint-0000000007\.h5 must be a whole file"):
            read_checkpoint(path)


def test_read_checkpoint_truncated_says_so(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="it is truncated"):
        read_checkpoint(path)


def test_read_checkpoint_with_a_bit_flipped_in_each_dataset_names_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    places: dict[str, tuple[int, int]] = {}
    with h5py.File(path, "r", locking=False) as file:

        def note(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and item.size:
                places[name] = (item.id.get_offset(), item.nbytes)

        file.visititems(note)
    assert len(places) == 1 + 2 * 2 + 1  # metadata, theta and momentum of each fragment, the one counter
    data = path.read_bytes()
    for name, (offset, num_bytes) in places.items():
        for where in (offset, offset + num_bytes // 2, offset + num_bytes - 1):
            damaged = bytearray(data)
            damaged[where] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"dataset {name} has flipped bits"):
                read_checkpoint(path)


def test_read_checkpoint_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    # HDF5's own structures have checksums, too, in the format chosen, and leave no gaps.
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    data = path.read_bytes()
    for where in range(0, len(data), max(1, len(data) // 250)):
        damaged = bytearray(data)
        damaged[where] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "not an HDF5 file"), (b"PK\x03\x04 something else" * 99, "not an HDF5 file")],
)
def test_read_checkpoint_not_hdf5_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "checkpoint-0000000001.h5"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(path)


def test_read_checkpoint_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(tmp_path / "checkpoint-0000000001.h5")
    with pytest.raises(CheckpointError, match="must be a whole file"):
        read_checkpoint(tmp_path)


def test_read_checkpoint_of_another_version_says_so(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    with h5py.File(path, "r+", locking=False) as file:
        file.attrs["format"] = np.bytes_("pyddl checkpoint 99")
    with pytest.raises(CheckpointError, match=r"'pyddl checkpoint 99'.*another version"):
        read_checkpoint(path)
    with h5py.File(tmp_path / "foreign.h5", "w", locking=False) as file:
        file["x"] = 1
    with pytest.raises(CheckpointError, match="something else"):
        read_checkpoint(tmp_path / "foreign.h5")


def test_read_checkpoint_with_a_dataset_removed_or_swapped_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(), keep=2)
    data = path.read_bytes()
    for name in ("fragments/00001/theta", "fragments/00000/momentum"):
        path.write_bytes(data)
        with h5py.File(path, "r+", locking=False) as file:
            del file[name]
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            read_checkpoint(path)
    path.write_bytes(data)
    with h5py.File(path, "r+", locking=False) as file:
        del file["fragments/00001/theta"]
        file["fragments/00001/theta"] = np.zeros(5, np.float32)
    with pytest.raises(CheckpointError, match=r"theta is \(5,\) float32"):
        read_checkpoint(path)


# ----------------------------------------------------------------------------------------------- newest good


def test_newest_good_checkpoint_all_good_returns_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, make_checkpoint(step), keep=2)
    found, path, bad = newest_good_checkpoint(tmp_path)
    assert (found.step, path.name, bad) == (2, "checkpoint-0000000002.h5", [])


def test_newest_good_checkpoint_with_two_bad_ones_names_them_and_uses_the_third(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, make_checkpoint(step), keep=3)
    os.truncate(tmp_path / "checkpoint-0000000003.h5", 1000)
    (tmp_path / "checkpoint-0000000002.h5").write_bytes(b"")
    found, path, bad = newest_good_checkpoint(tmp_path)
    assert found.step == 1
    assert path.name == "checkpoint-0000000001.h5"
    assert ["0003.h5" in bad[0], "truncated" in bad[0], "0002.h5" in bad[1]] == [True, True, True]


def test_newest_good_checkpoint_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        newest_good_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="found none"):
        newest_good_checkpoint(tmp_path / "missing")
    (tmp_path / "checkpoint-0000000002.h5").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found 1 files, none of them good: .*0002\.h5"):
        newest_good_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------- disk full, kill


def test_write_checkpoint_on_a_full_disk_leaves_the_one_before(
    tmp_path: Path, full_disk: Callable[[int | None], None]
) -> None:
    before = write_checkpoint(tmp_path, make_checkpoint(1), keep=2)
    size = before.stat().st_size
    open_files = os.listdir("/proc/self/fd")
    for limit in (0, 1, 100, 2000, size // 2, size - 500, size - 1):
        full_disk(limit)
        with pytest.raises(CheckpointError, match=r"0002\.h5 must be written in whole .* File too large"):
            write_checkpoint(tmp_path, make_checkpoint(2), keep=2)
        full_disk(None)
        assert os.listdir(tmp_path) == [before.name], limit
    assert os.listdir("/proc/self/fd") == open_files
    assert newest_good_checkpoint(tmp_path)[1] == before
    assert_equal(read_checkpoint(write_checkpoint(tmp_path, make_checkpoint(2), keep=2)), make_checkpoint(2))


def test_write_checkpoint_interrupted_by_a_signal_handler_removes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The exception is raised within a call that HDF5 makes; it may neither vanish nor reach HDF5.
    pwrite = os.pwrite
    num_calls = 0

    def interrupted(fd: int, data: memoryview, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, make_checkpoint(1), keep=2)
    assert os.listdir(tmp_path) == []
    assert_equal(read_checkpoint(write_checkpoint(tmp_path, make_checkpoint(1), keep=2)), make_checkpoint(1))


def test_write_checkpoint_without_enough_free_space_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = make_checkpoint().layout.num_elements * 8
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert total > 1000
    with pytest.raises(CheckpointError, match=r"only 1000 bytes are free; make room"):
        write_checkpoint(tmp_path, make_checkpoint(2), keep=2)
    assert os.listdir(tmp_path) == []


def test_write_checkpoint_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write_checkpoint(tmp_path / "missing", make_checkpoint(2), keep=2)


def test_write_checkpoint_failing_to_tidy_up_has_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, make_checkpoint(1), keep=1)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    path = write_checkpoint(tmp_path, make_checkpoint(2), keep=1)
    assert read_checkpoint(path).step == 2
    assert "could not be removed" in caplog.text


def test_write_checkpoint_removes_temporary_files_of_dead_writers_only(tmp_path: Path) -> None:
    own = ProcessIdentity.own()
    host = own.token.split(".")[0]
    dead = tmp_path / f".checkpoint-0000000009.h5.{host}.{own.pid}.{own.start_ticks + 1}.0.tmp"
    living = tmp_path / f".learner-0.h5.{host}.{os.getppid()}.{start_ticks(os.getppid())}.3.tmp"
    elsewhere = tmp_path / ".checkpoint-0000000009.h5.elsewhere.1.1.0.tmp"
    elsewhere_old = tmp_path / ".checkpoint-0000000009.h5.elsewhere.1.1.1.tmp"
    other = tmp_path / ".notes.tmp"
    for file in (dead, living, elsewhere, elsewhere_old, other):
        file.touch()
    an_hour_ago = time.time() - 3600
    os.utime(elsewhere_old, (an_hour_ago, an_hour_ago))
    path = write_checkpoint(tmp_path, make_checkpoint(1), keep=2)
    assert set(tmp_path.iterdir()) == {path, living, elsewhere, other}


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoint import make_checkpoint
from pyddl.store.checkpoint import list_checkpoints, write_checkpoint
first = int(sys.argv[3])
for step in itertools.count(first):
    write_checkpoint(sys.argv[1], make_checkpoint(step), keep=2)
    sys.stdout.write(f"{step}\\n"); sys.stdout.flush()
"""


def test_write_checkpoint_killed_at_any_instant_leaves_a_good_one(tmp_path: Path) -> None:
    # Each kill falls elsewhere within a write: the delays are spread over about ten writes.
    step = 0
    for attempt in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent), str(step + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        reported = int(writer.stdout.readline())
        time.sleep(0.0037 * attempt)
        writer.kill()
        reported = max([reported, *(int(line) for line in writer.stdout.read().splitlines())])
        writer.stdout.close()
        writer.wait()
        found, _, bad = newest_good_checkpoint(tmp_path)
        step = found.step
        assert step in (reported, reported + 1)
        assert bad == []
        assert_equal(found, make_checkpoint(step))
        assert len(list_checkpoints(tmp_path)) <= 3
    write_checkpoint(tmp_path, make_checkpoint(step + 1), keep=2)
    assert len(os.listdir(tmp_path)) == 2  # nothing is left of the dead


# --------------------------------------------------------------------------------------------- learner state


def test_learner_state_written_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "learner-3.h5"
    arrays = {
        "optimizer/0/exp_avg": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "a.b.c": np.array(7, dtype=np.int64),
        "..": np.array([], dtype=np.float64),
        "empty": np.zeros((3, 0, 2), dtype=np.uint16),
        "rng": np.arange(255, dtype=np.uint8),
        "mask": np.array([True, False]),
        "half": np.array([1.5, np.inf], dtype=np.float16),
        "big_endian": np.array([1, 2], dtype=">i4"),
        "complex": np.array([1 + 2j]),
    }
    meta = {"epoch": 1, "dtypes": {"rng": "bf16"}}
    write_learner_state(path, arrays, meta)
    found, found_meta = read_learner_state(path)
    assert list(found) == list(arrays)
    assert found_meta == meta
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype.newbyteorder("<")
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
    assert os.listdir(tmp_path) == [path.name]


def test_learner_state_damaged_missing_or_foreign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.h5"
    with pytest.raises(CheckpointError, match="no such file"):
        read_learner_state(path)
    write_learner_state(path, {"x": np.arange(100, dtype=np.int64)}, {})
    data = path.read_bytes()
    where = data.index(np.arange(100, dtype=np.int64).tobytes()) + 50
    path.write_bytes(data[:where] + b"\x01" + data[where + 1 :])
    with pytest.raises(CheckpointError, match="flipped bits"):
        read_learner_state(path)
    with pytest.raises(CheckpointError, match="pyddl learner 1"):
        read_learner_state(write_checkpoint(tmp_path, make_checkpoint(), keep=2))


def test_learner_state_on_a_full_disk_leaves_the_one_before(
    tmp_path: Path, full_disk: Callable[[int | None], None]
) -> None:
    path = tmp_path / "learner-0.h5"
    write_learner_state(path, {"x": np.zeros(1000)}, {"step": 1})
    full_disk(2000)
    with pytest.raises(CheckpointError, match="File too large"):
        write_learner_state(path, {"x": np.ones(1000)}, {"step": 2})
    full_disk(None)
    assert read_learner_state(path)[1] == {"step": 1}
    assert os.listdir(tmp_path) == [path.name]


def test_learner_state_of_text_or_objects_is_refused(tmp_path: Path) -> None:
    for value in (np.array(["a"]), np.array([None])):
        with pytest.raises(ShapeError, match="numbers or bools"):
            write_learner_state(tmp_path / "learner-0.h5", {"x": value}, {})
