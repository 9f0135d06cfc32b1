"""What outlasts the processes of a run: the syncer's checkpoints and a learner's own state, as HDF5 files.

Here: writing them whole or not at all, reading them with every byte verified, finding the newest good one.
Not here: when a checkpoint is due (core/protocol.py) and what a snapshot of the protocol holds, the tape
(trace.py), files for other programs (export.py).

Each file holds a dataset ``metadata`` (JSON) and arrays, all one-dimensional, each with its CRC32C as
attribute. The format is that of HDF5 1.10, in which the library's own structures have checksums, too; so a
flipped bit is found wherever it matters. Nothing is pickled. Locking by HDF5 is off: it fails on many file
systems of clusters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped,unused-ignore]
import numpy as np
from numpy.typing import NDArray

from ..core.kernels import checksum
from ..core.layout import Layout
from ..errors import CheckpointError, LayoutMismatch, ShapeError
from .files import replacing, sync_folder

__all__ = [
    "Checkpoint",
    "FragmentState",
    "list_checkpoints",
    "newest_good_checkpoint",
    "read_checkpoint",
    "read_learner_state",
    "set_aside_after",
    "write_checkpoint",
    "write_learner_state",
]

logger = logging.getLogger(__name__)

_CHECKPOINT_FORMAT = "pyddl checkpoint 1"
_LEARNER_FORMAT = "pyddl learner 1"
_NAME = re.compile(r"checkpoint-([0-9]{10,})\.h5")
_LIBRARY = ("v110", "v110")
_PIECE_BYTES = 1 << 20  # checksummed, and written while still in the cache; 4 MiB held the GIL longer
_STRUCTURE_BYTES = 4096  # more than HDF5 needs per dataset


@dataclass(frozen=True, eq=False)
class FragmentState:
    """The global model's share in one fragment.

    Attributes:
        version: of the fragment; rises by one with each merge.
        theta: [n] float32, the parameters Theta.
        momentum: [n] float32 of the outer optimizer, or None if it has none.
        counters: [k] int64, integer buffers.
    """

    version: int
    theta: NDArray[np.float32]
    momentum: NDArray[np.float32] | None
    counters: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a syncer needs to go on.

    Attributes:
        step: the clock t, in steps, >= 0.
        layout: the tensors and how they are cut into fragments.
        fragments: one state per fragment of ``layout``, in order.
        protocol: snapshot of the protocol; JSON values only.
        config_toml: the configuration of the run as text.
        meta: whatever else is worth knowing; JSON values only.
    """

    step: int
    layout: Layout
    fragments: tuple[FragmentState, ...]
    protocol: dict[str, Any]
    config_toml: str
    meta: dict[str, Any]


# ---------------------------------------------------------------------------------------------- checkpoints


def write_checkpoint(folder: str | Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write ``checkpoint-<step>.h5`` into ``folder`` and remove all but the newest ``keep``.

    The arrays may not change until this returns. Both the write and the checksums run without the GIL.

    Args:
        folder: exists; only one process at a time may write checkpoints there (lock.py).
        checkpoint: the state.
        keep: checkpoints to keep, this one included, >= 1.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: if the file cannot be written (disk full); older checkpoints are untouched. A run
            should log it and go on.
        ShapeError: if the arrays do not fit the layout.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, or the checkpoint just written would go; got {keep}")
    folder = Path(folder)
    datasets = _checkpoint_datasets(checkpoint)
    metadata = {
        "step": checkpoint.step,
        "layout": checkpoint.layout.to_json(),
        "fingerprint": checkpoint.layout.fingerprint,
        "versions": [int(state.version) for state in checkpoint.fragments],
        "protocol": checkpoint.protocol,
        "config_toml": checkpoint.config_toml,
        "meta": checkpoint.meta,
    }
    path = folder / f"checkpoint-{checkpoint.step:010d}.h5"
    _write(path, _CHECKPOINT_FORMAT, metadata, datasets)
    # From here on the checkpoint exists; a failure to tidy up is no failure to write it.
    try:
        _tidy(folder, path, keep)
    except OSError as error:
        logger.warning("checkpoints older than %s could not be removed: %s", path, error)
    return path


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint and verify all its checksums.

    Raises:
        CheckpointError: if it is missing, truncated, damaged, not HDF5 or of another version of pyddl.
    """
    path = Path(path)
    with _reading(path, _CHECKPOINT_FORMAT) as (metadata, file):
        layout = Layout.from_json(metadata["layout"])
        if layout.fingerprint != metadata["fingerprint"] or len(metadata["versions"]) != len(layout.fragments):
            raise _Damaged("layout and metadata contradict each other")
        states = []
        for fragment, version in zip(layout.fragments, metadata["versions"], strict=True):
            group = f"fragments/{fragment.index:05d}"
            momentum = f"{group}/momentum"
            states.append(
                FragmentState(
                    version=version,
                    theta=_read_array(file, f"{group}/theta", np.float32, fragment.num_elements),
                    momentum=_read_array(file, momentum, np.float32, fragment.num_elements)
                    if momentum in metadata["datasets"]
                    else None,
                    counters=_read_array(file, f"{group}/counters", np.int64, fragment.num_counters),
                )
            )
        return Checkpoint(
            step=metadata["step"],
            layout=layout,
            fragments=tuple(states),
            protocol=metadata["protocol"],
            config_toml=metadata["config_toml"],
            meta=metadata["meta"],
        )


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints in ``folder``, good or not, the latest step first; [] if there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"a run must be a folder that can be listed; {folder}: {error.strerror}; name the folder of a run"
        ) from None
    steps = sorted(((int(m[1]), name) for name in names if (m := _NAME.fullmatch(name))), reverse=True)
    return [Path(folder) / name for _, name in steps]


def newest_good_checkpoint(folder: str | Path) -> tuple[Checkpoint, Path, list[str]]:
    """Find the newest checkpoint in ``folder`` that is whole.

    Returns:
        The checkpoint, its path, and a sentence on each newer one that is not good; see :func:`set_aside_after`.

    Raises:
        CheckpointError: if there is none.
    """
    bad: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path), path, bad
        except CheckpointError as error:
            bad.append(str(error))
    found = f"{len(bad)} files, none of them good: " + " | ".join(bad) if bad else "none"
    raise CheckpointError(
        f"to go on from {folder}, it must hold a good checkpoint-<step>.h5; found {found}; "
        "name another run, or start anew without resume"
    )


def set_aside_after(path: Path) -> None:
    """Rename the checkpoints that are later than the one from which a run goes on: damaged, or of a course given up.

    Were they counted among those that are kept, they would push good ones out. Not removed: a person may want to look
    at them.
    """
    folder = path.parent
    for later in list_checkpoints(folder):
        if later == path:
            break
        logger.warning("%s is later than %s, from which the run goes on; it is renamed", later, path.name)
        with contextlib.suppress(OSError):  # the next one that is written tries again
            later.rename(later.with_name(f"{later.name}.superseded"))


def _checkpoint_datasets(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    layout = checkpoint.layout
    if len(checkpoint.fragments) != len(layout.fragments):
        raise ShapeError(
            f"a checkpoint must hold a state for each of the layout's {len(layout.fragments)} fragments; "
            f"got {len(checkpoint.fragments)}; pass all of them"
        )
    datasets: dict[str, NDArray[Any]] = {}
    for fragment, state in zip(layout.fragments, checkpoint.fragments, strict=True):
        wanted = {
            "theta": (state.theta, np.float32, fragment.num_elements),
            "momentum": (state.momentum, np.float32, fragment.num_elements),
            "counters": (state.counters, np.int64, fragment.num_counters),
        }
        for name, (array, dtype, size) in wanted.items():
            if array is None:
                continue
            if array.dtype != dtype or array.shape != (size,):
                raise ShapeError(
                    f"{name} of fragment {fragment.index} must be [{size}] {np.dtype(dtype)}; "
                    f"got {list(array.shape)} {array.dtype}; pass the arrays of this layout"
                )
            datasets[f"fragments/{fragment.index:05d}/{name}"] = array
    return datasets


def _tidy(folder: Path, newest: Path, keep: int) -> None:
    """Keep ``newest`` and the ``keep`` - 1 before it.

    A checkpoint of a later step is one that a resume has passed over: were it left, the next would meet it again.
    """
    set_aside_after(newest)
    names = list_checkpoints(folder)
    position = names.index(newest)
    for path in names[position + keep :]:
        path.unlink()
    sync_folder(folder)


# -------------------------------------------------------------------------------------------- learner state


def write_learner_state(path: str | Path, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
    """Write a learner's own state: inner optimizer, data cursor, random number generators.

    Args:
        path: the file, replaced as a whole.
        arrays: any names, any shapes, numbers or bools; what numpy has no type for (bfloat16) is passed as
            its bits, and ``meta`` says so.
        meta: JSON values only.

    Raises:
        CheckpointError: if the file cannot be written (disk full); the one before is untouched.
        ShapeError: for an array of objects or text.
    """
    datasets: dict[str, NDArray[Any]] = {}
    described = []
    # HDF5 gives "/" and "." in names a meaning of their own, so that the names are kept in the metadata.
    for index, (name, value) in enumerate(arrays.items()):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise ShapeError(
                f"array {name!r} of a learner's state must hold numbers or bools; got {array.dtype}; put text into meta"
            )
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        described.append({"name": name, "shape": list(array.shape), "dtype": array.dtype.str})
        datasets[f"arrays/{index:06d}"] = array.reshape(-1)
    _write(Path(path), _LEARNER_FORMAT, {"arrays": described, "meta": meta}, datasets)


def read_learner_state(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read what :func:`write_learner_state` wrote and verify all checksums.

    Returns:
        The arrays by name, in their order, and ``meta``.

    Raises:
        CheckpointError: if it is missing, truncated, damaged, not HDF5 or of another version of pyddl.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with _reading(Path(path), _LEARNER_FORMAT) as (metadata, file):
        for index, item in enumerate(metadata["arrays"]):
            shape = tuple(item["shape"])
            flat = _read_array(
                file, f"arrays/{index:06d}", np.dtype(item["dtype"]), int(np.prod(shape, dtype=np.int64))
            )
            arrays[item["name"]] = flat.reshape(shape)
        return arrays, metadata["meta"]


# -------------------------------------------------------------------------------------------- HDF5 with care


class _Damaged(Exception):
    """What is wrong with a file, as a part of a sentence."""


def _write(path: Path, file_format: str, metadata: dict[str, Any], datasets: Mapping[str, NDArray[Any]]) -> None:
    text = json.dumps({"format": file_format, "datasets": sorted(datasets), **metadata}).encode("ascii")
    everything = {"metadata": np.frombuffer(text, dtype=np.uint8), **datasets}
    needed_bytes = sum(array.nbytes + _STRUCTURE_BYTES for array in everything.values())
    try:
        # Asked first, so that a disk is not filled to the last byte, which would stop the tape, too.
        free_bytes = shutil.disk_usage(path.parent).free
        if free_bytes < needed_bytes:
            raise _Damaged(f"only {free_bytes} bytes are free")
        with replacing(path) as temporary, temporary.open("r+b", buffering=0) as raw:
            sink = _Sink(raw.fileno())
            try:
                with h5py.File(sink, "w", libver=_LIBRARY) as file:
                    file.attrs["format"] = np.bytes_(file_format)
                    for name, array in everything.items():
                        _write_array(file, name, array, sink)
            finally:
                if sink.error is not None:  # the cause, whatever HDF5 says in consequence
                    raise sink.error
    except (OSError, RuntimeError, _Damaged) as error:
        raise CheckpointError(
            f"{path} must be written in whole ({needed_bytes} bytes); {_reason(error)}; "
            "make room, or choose another run.dir; what was there before is untouched"
        ) from error


class _Sink:
    """A file for HDF5 to write to, whose failures HDF5 never sees.

    After a failed write (disk full), HDF5 2.0 goes on with structures that it has freed: closing the file
    raises, and in a later, innocent call the process dies by a segmentation fault or a bus error. So from the
    first failure on, this object says yes to everything and writes nothing; the caller looks at ``error``.
    """

    def __init__(self, fd: int) -> None:
        self.error: BaseException | None = None
        self._fd = fd
        self._position = 0
        self._end = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: memoryview) -> int:
        start, num_bytes = self._position, len(data)
        self._position += num_bytes
        self._end = max(self._end, self._position)
        done = 0
        try:
            while self.error is None and done < num_bytes:
                done += os.pwrite(self._fd, data[done:], start + done)  # without the GIL
        except BaseException as error:  # also what a signal handler raises: HDF5 may see none of it
            self.error = error
        return num_bytes

    def read(self, num_bytes: int = -1) -> bytes:
        data = bytearray(self._end - self._position if num_bytes < 0 else num_bytes)
        return bytes(data[: self.readinto(memoryview(data))])

    def readinto(self, data: memoryview) -> int:
        num_bytes = max(0, min(len(data), self._end - self._position))
        try:
            done = os.preadv(self._fd, [data[:num_bytes]], self._position)
        except BaseException as error:
            self.error = self.error or error
            done = 0
        data[done:num_bytes] = bytes(num_bytes - done)
        self._position += num_bytes
        return num_bytes

    def truncate(self, size: int | None = None) -> int:
        self._end = self._position if size is None else size
        try:
            if self.error is None:
                os.ftruncate(self._fd, self._end)
        except BaseException as error:
            self.error = error
        return self._end

    def flush(self) -> None:
        pass  # nothing is kept back


def _write_array(file: h5py.File, name: str, array: NDArray[Any], sink: _Sink) -> None:
    array = np.ascontiguousarray(array)
    dataset = file.create_dataset(name, shape=array.shape, dtype=array.dtype)
    crc = 0
    step = max(1, _PIECE_BYTES // array.itemsize)
    for start in range(0, array.size, step):
        piece = array[start : start + step]
        crc = checksum(piece, crc)
        dataset[start : start + step] = piece
        if sink.error is not None:
            return
    dataset.attrs["crc32c"] = np.uint32(crc)


@contextlib.contextmanager
def _reading(path: Path, file_format: str) -> Iterator[tuple[dict[str, Any], h5py.File]]:
    """Open a file and verify its metadata; what goes wrong, also in the body, becomes a CheckpointError."""
    try:
        if not path.exists():
            raise _Damaged("there is no such file")
        with h5py.File(path, "r", locking=False) as file:
            found = bytes(file.attrs.get("format", b"")).decode("ascii", "replace")
            if found != file_format:
                raise _Damaged(f"its format is {found!r}: it is something else, or of another version of pyddl")
            metadata = json.loads(_read_array(file, "metadata", np.uint8, None).tobytes())
            yield metadata, file
            return
    except LayoutMismatch as error:
        reason = f"its layout cannot be used ({error})"
    # What HDF5, h5py and JSON raise over bytes that make no sense to them.
    except (
        _Damaged,
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        MemoryError,
    ) as error:
        reason = _reason(error)
    raise CheckpointError(
        f"{path} must be a whole file with the format {file_format!r}; {reason}; use the one before, or another copy"
    )


def _read_array(file: h5py.File, name: str, dtype: Any, size: int | None) -> NDArray[Any]:
    """Read a one-dimensional dataset of ``size`` elements (None: as many as there are) and verify it."""
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise _Damaged(f"dataset {name} is missing or cannot be found")
    if dataset.dtype != dtype or dataset.ndim != 1 or size not in (None, dataset.size):
        raise _Damaged(f"dataset {name} is {dataset.shape} {dataset.dtype}, not ({size},) {np.dtype(dtype)}")
    stored = dataset.attrs.get("crc32c")
    if stored is None:
        raise _Damaged(f"dataset {name} has no checksum")
    array = np.empty(dataset.shape, dtype)
    crc = 0
    step = max(1, _PIECE_BYTES // array.itemsize)
    for start in range(0, array.size, step):
        piece = array[start : start + step]
        dataset.read_direct(array, np.s_[start : start + step], np.s_[start : start + step])
        crc = checksum(piece, crc)
    if crc != int(stored):
        raise _Damaged(f"dataset {name} has flipped bits (CRC32C {crc:#010x}, stored {int(stored):#010x})")
    return array


def _reason(error: BaseException) -> str:
    """A short reason for what HDF5 says at length."""
    if isinstance(error, _Damaged):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    text = str(error)
    if "truncated file" in text:
        return "it is truncated"
    if "file signature not found" in text:
        return "it is not an HDF5 file, or its beginning is damaged"
    return f"it is damaged ({type(error).__name__}: {text})"
