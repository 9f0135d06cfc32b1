"""The event tape: what happened in a run, one JSON object per line.

Here: :class:`Trace`, which appends lines and never stops its caller, and :func:`read_trace`, which reads what
a killed process or a full disk left behind. A syncer's ``events.jsonl`` and a learner's
``receipts-<learner_id>.jsonl`` are both a :class:`Trace`; only their names and kinds differ.
Not here: what the kinds mean (run/ and core/protocol.py say), metrics derived from them (view/).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError

__all__ = ["Trace", "TraceReader", "read_trace"]

logger = logging.getLogger(__name__)


class Trace:
    """An append-only file of JSON lines that a kill at any instruction leaves readable.

    Every opening begins with a line ``run_opened`` that holds ``fields``, the process id and the wall-clock
    time; the lines after it hold ``kind``, ``time_s`` (seconds since the opening, monotonic) and what
    :meth:`write` was given. Each line is one write(2), so that a kill tears at most the last one. May be used
    from several threads.

    Args:
        path: the file; created, or continued if it exists. None: nothing is written by any call.
        fields: what holds for all lines of this opening (role, learner_id, incarnation, fingerprint ...); it
            stands in ``run_opened`` only.
        clock: seconds, monotonic; a simulation passes its virtual clock.
        retry_s: after a failed write (disk full) lines are dropped and counted for so long before a new try.

    Raises:
        ConfigError: if the file cannot be opened. Later failures never raise.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        fields: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = 1.0,
    ) -> None:
        """Open the file and write ``run_opened``; the arguments are those of the class."""
        self.path = None if path is None else Path(path)
        self.num_lost = 0  # lines of this opening that are not in the file, reported in it or not
        self._clock = clock
        self._opened_s = clock()
        self._retry_s = retry_s
        self._retry_at_s = -math.inf  # of time.monotonic: a virtual clock says nothing about a real disk
        self._lock = threading.RLock()  # a signal handler may write in the midst of a write
        self._fd: int | None = None
        self._cause: str | None = None  # of the failure that lasts; a warning is due only when it changes
        self._num_unreported = 0
        self._unterminated = False  # the file ends in a torn line; the next write must begin with a newline
        self._header: bytes | None = None  # run_opened, until it is in the file
        if self.path is None:
            return
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size_bytes = os.fstat(self._fd).st_size
            if size_bytes:
                self._unterminated = os.pread(self._fd, 1, size_bytes - 1) != b"\n"
        except OSError as error:
            if self._fd is not None:
                os.close(self._fd)
            raise ConfigError(
                f"a trace must be a file that can be created and appended to; {self.path}: {error.strerror}; "
                "create its folder, or choose another run.dir"
            ) from None
        wall = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        header = {"kind": "run_opened", "time_s": 0.0, "wall": wall, "pid": os.getpid(), **(fields or {})}
        self._header = _encode(header)
        with self._lock:
            self._append(None, 0.0)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line; returns without an exception whatever the disk does.

        Args:
            kind: what happened, in the past tense.
            **fields: JSON values, numpy scalars and arrays, dataclasses, enums, paths. NaN and infinities
                become the strings "nan", "inf" and "-inf", which ``float`` reads back.
        """
        with self._lock:
            # The clock is read under the lock, so that time_s never falls from one line to the next.
            self._write_at(self._time_s(), kind, fields)

    def _write_at(self, time_s: float, kind: str, fields: dict[str, Any]) -> None:
        if self.path is None:
            return
        if "time_s" in fields:
            raise TypeError("time_s is set by the trace itself; give your own time another name")
        with self._lock:
            self._append(_encode({"kind": kind, "time_s": time_s, **fields}), time_s)

    def close(self) -> None:
        """Report lines lost so far, if that is possible now, and close the file; may be called twice."""
        with self._lock:
            if self._fd is None:
                return
            self._retry_at_s = -math.inf
            if self._header is not None or self._num_unreported:
                self._append(None, self._time_s())
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Trace:
        """Return the trace itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _time_s(self) -> float:
        return round(self._clock() - self._opened_s, 6)

    def _append(self, line: bytes | None, time_s: float) -> None:
        """Put what is overdue and then ``line`` into the file, or count it as lost; the lock is held."""
        try:
            if self._fd is None:
                raise OSError(0, "the trace is closed")
            if self._cause is not None and time.monotonic() < self._retry_at_s:
                self._count(line)
                return
            if self._header is not None:
                self._put(self._fd, self._header)
                self._header = None
            if self._num_unreported:
                report = {"kind": "lines_lost", "time_s": time_s, "count": self._num_unreported}
                self._put(self._fd, _encode(report))
                self._num_unreported = 0
            if line is not None:
                self._put(self._fd, line)
        except OSError as error:
            self._count(line)
            self._retry_at_s = time.monotonic() + self._retry_s
            cause = error.strerror or str(error)
            if cause != self._cause:
                logger.warning("%s takes no more lines (%s); they are counted instead", self.path, cause)
            self._cause = cause
        else:
            if self._cause is not None:
                logger.warning("%s takes lines again; %d were lost so far", self.path, self.num_lost)
            self._cause = None

    def _count(self, line: bytes | None) -> None:
        if line is not None:
            self.num_lost += 1
            self._num_unreported += 1

    def _put(self, fd: int, line: bytes) -> None:
        data = b"\n" + line if self._unterminated else line
        while data:  # once, unless the disk fills up within the line: then the second call says why
            num_bytes = os.write(fd, data)
            # What a full disk took of the line stays there: somebody may be reading it.
            self._unterminated = data[num_bytes - 1 : num_bytes] != b"\n"
            data = data[num_bytes:]


class TraceReader(Iterator[dict[str, Any]]):
    """Iterator over the lines of a trace; ``num_torn`` counts those skipped so far, being no JSON objects."""

    def __init__(self, path: str | Path) -> None:
        """Check that ``path`` can be read."""
        self.path = Path(path)
        self.num_torn = 0
        try:
            self.path.open("rb").close()  # so that a wrong path is refused here and not at the first line
        except OSError as error:
            raise ConfigError(
                f"a trace must be a readable file of JSON lines; {self.path}: {error.strerror}; "
                "name a file such as RUN/events.jsonl"
            ) from None
        self._lines = _lines(self.path)

    def __next__(self) -> dict[str, Any]:
        """Return the next whole line."""
        for line in self._lines:
            try:
                value = json.loads(line)
            except ValueError:  # also of bytes that are not UTF-8
                value = None
            if isinstance(value, dict):
                return value
            self.num_torn += 1
        raise StopIteration


def read_trace(path: str | Path) -> TraceReader:
    """Read a trace line by line, past lines that a kill has torn, at the end or after a resume amid others.

    Args:
        path: a file written by :class:`Trace`, which may still be open elsewhere.

    Returns:
        An iterator over the lines as dicts; its ``num_torn`` counts the lines skipped.

    Raises:
        ConfigError: if the file cannot be opened.
    """
    return TraceReader(path)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(fields, default=_plain, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        # A NaN somewhere, or a key that is no string: rare, so only then the slow way.
        text = json.dumps(_plain_tree(fields), separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _plain(value: object) -> Any:
    """One level of a value that json does not know, as something that it may know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A line with an odd value in it is worth more than a syncer that ends over it.
    return repr(value)


def _plain_tree(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return _plain_tree(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {_key(key): _plain_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_tree(item) for item in value]
    return _plain_tree(_plain(value))


def _key(key: object) -> str:
    plain = key if isinstance(key, str) else _plain_tree(key)
    return plain if isinstance(plain, str) else json.dumps(plain)
