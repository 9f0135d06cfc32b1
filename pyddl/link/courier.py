"""The learner's link thread: it carries everything between a learner's rank and its mailbox.

Here: one thread per rank that reads the down board, writes words, uploads snapshots and fetches published fragments,
each as a small generator; the training thread only exchanges plain values with it and never waits. Not here: what the
values mean (run/exchange.py), MPI calls (world.py hands in the window).

No call that can last is ever made (rule 14): payloads go in pieces of at most 4 MiB, each polled; what has been started
counts as arrived (is *flushed*) when the target has answered a read of the board that was started later, with nothing
new in between. A link whose piece or read does not move for ``stall_s`` is *stalled*: it starts nothing new until the
board answers again. Small words that have waited for that hold back the next piece of a long payload.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.kernels import checksum, decode_bf16
from ..core.layout import Layout
from ..errors import TransportError
from .buffers import BufferPool
from .mailbox import (
    HEADER_BYTES,
    LOSS,
    NOT_MERGED,
    STATE,
    STEPS,
    TOKENS,
    WIRE_BYTES,
    WIRE_DTYPE,
    Board,
    DownHeader,
    Geometry,
    UpHeader,
)

__all__ = ["Arrival", "Courier", "Pending", "RemoteWindow", "Upload"]

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
_BEAT_S = 0.1
_FLUSH_WITHIN_S = 0.05  # words wait no longer for their Flush, however long payloads go on moving
_BUSY_POLL_S = 0.0005
_MIN_POLL_S = 0.001
_MAX_POLL_S = 0.01
_FLOAT, _FLOAT_BITS = struct.Struct("<d"), struct.Struct("<Q")

Task = Generator[bool, None, None]  # yields whether something of it is in flight


class Pending(Protocol):
    """An operation that has been started."""

    def test(self) -> bool:
        """Whether it is complete; never blocks."""
        ...


class RemoteWindow(Protocol):
    """The origin's end of a mailbox. Offsets in bytes; buffers must live until the operation is complete."""

    def get(self, offset: int, out: NDArray[np.uint8]) -> Pending:
        """Start to read ``out.nbytes`` bytes."""
        ...

    def put(self, offset: int, data: NDArray[np.uint8]) -> Pending:
        """Start to write ``data``; complete means that the buffer may be reused, not that it has arrived."""
        ...

    def write_word(self, offset: int, value: int) -> None:
        """Start to replace one aligned 8-byte word; arrived after the next flush."""
        ...

    def flush(self) -> None:
        """Settle what was started before the read that was answered just now, and has arrived by that. Never blocks."""
        ...


class GroupGather(Protocol):
    """Joins the slices of a learner's ranks."""

    def start(self, mine: NDArray[np.uint8], out: NDArray[np.uint8], bounds: list[tuple[int, int]]) -> Pending:
        """Start to collect every rank's slice of ``out``; ranks call it in the same order."""
        ...


@dataclass
class Upload:
    """One rank's part of a contribution.

    Attributes:
        encode: runs in the link thread; returns the header that rank 0 sends ahead of its slice (None on other ranks),
            and this rank's slice as it goes on the wire, uint8.
        counters: [c] int64, sent by rank 0.
    """

    round: int
    line: int
    fragment: int
    num_elements: int
    num_counters: int
    encode: Callable[[], tuple[UpHeader | None, NDArray[np.uint8]]]
    counters: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class Arrival:
    """A published fragment that this rank holds completely. ``floats`` [n] float32 is the receiver's to keep."""

    sequence: int
    fragment: int
    version: int
    step: int
    contains_round: int
    floats: NDArray[np.float32]
    counters: NDArray[np.int64]


class Courier(threading.Thread):
    """The link thread of one rank.

    Args:
        window: the mailbox.
        geometry: its shape.
        layout: fragments, for their sizes.
        learner_id: whose it is, for messages.
        rank: within the learner's group.
        gather: joins slices; None when G = 1.
        run_token: as in the mailbox's headers.
        stall_s: without any movement for so long the link counts as stalled.
        pool: where buffers of arrivals come from.
    """

    def __init__(
        self,
        window: RemoteWindow,
        geometry: Geometry,
        layout: Layout,
        *,
        learner_id: int,
        rank: int,
        gather: GroupGather | None,
        run_token: int,
        stall_s: float,
        pool: BufferPool,
    ) -> None:
        super().__init__(name="pyddl-link", daemon=True)
        self.board: Board | None = None
        self.board_words: NDArray[np.uint64] | None = None  # the same, raw
        self.heard_s = time.monotonic()  # when the syncer's heartbeat was last seen to change
        self.stalled = False
        self.received_sequence = 0
        self.failure: BaseException | None = None
        self.num_damaged = 0
        self.num_stalls = 0
        self._window = window
        self._geometry = geometry
        self._layout = layout
        self._rank = rank
        self._who = f"learner {learner_id} rank {rank}"
        self._gather = gather
        self._run_token = run_token
        self._pool = pool
        self._stall_s = stall_s
        self._asleep = (
            threading.Lock()
        )  # held while there is nothing to hurry for; released by whoever wakes the thread
        self._asleep.acquire()
        self._in_a_hurry = False
        self._ending = False
        self._words: dict[int, int] = {}  # offset -> newest value to write
        self._progress: tuple[int, int, float, int] | None = None  # newest values of the up board's first words
        self._written_progress: tuple[int, int, float, int] | None = None
        self._written_words: list[int] = []
        self._chores: deque[Callable[[], None]] = deque()
        self._uploads: deque[Upload] = deque()
        self._arrivals: deque[Arrival] = deque()
        self._max_arrivals = len(layout.fragments) + geometry.num_slots
        self._step_s = 0.0
        self._pings = 0
        self._flushed_ping = 0
        self._unflushed = False
        self._unflushed_s = 0.0  # since when
        self._settling = False  # nothing is started until a ping has been answered
        self._flush_wanted = 0
        self._moving = 0
        self._beats = 0
        self._next_beat_s = 0.0

    # ------------------------------------------------------------------- the training thread's side; never blocks

    def report(self, *, state: int, step: int, num_steps: int, tokens: int, loss: float) -> None:
        """Put the learner's progress on the up board (rank 0)."""
        # the link thread does the rest: the training thread only leaves the newest values
        self._progress = (step << 32 | num_steps, tokens, loss, state)

    def announce(self, line: int, word: int) -> None:
        """Answer the round on a line (rank 0)."""
        self._words[self._geometry.announcement_word(line)] = word
        self._in_a_hurry = True

    def submit(self, upload: Upload) -> None:
        """Send a snapshot."""
        self._uploads.append(upload)
        self._in_a_hurry = True

    def do_soon(self, chore: Callable[[], None]) -> None:
        """Let the link thread do something short, beside the next step."""
        self._chores.append(chore)
        self._in_a_hurry = True

    def boundary_done(self, step_s: float) -> None:
        """Called last at a step boundary: what was announced and submitted at it does not wait for the next poll.

        Not earlier, else the link thread would compete with the training thread's copies.

        Args:
            step_s: length of a step, seconds: a board that is read well within each is read soon enough.
        """
        self._step_s = step_s
        if self._in_a_hurry:
            self._in_a_hurry = False
            self._awake()

    def _awake(self) -> None:
        try:
            self._asleep.release()
        except RuntimeError:  # it was told already
            pass

    def arrivals(self, upto_sequence: int) -> list[Arrival]:
        """What is held up to a sequence number, in order of arrival; left in place until :meth:`taken`."""
        if not self._arrivals:
            return []
        return [a for a in list(self._arrivals) if a.sequence <= upto_sequence]

    def taken(self, arrivals: list[Arrival]) -> None:
        """These have been applied or superseded."""
        for arrival in arrivals:
            self._arrivals.remove(arrival)

    @property
    def idle(self) -> bool:
        """Whether nothing of this rank waits to be sent."""
        written = self._progress is self._written_progress
        return written and not self._chores and not self._uploads and not self._words and not self._unflushed

    def end(self, timeout_s: float) -> bool:
        """Send what is left of the words, for at most ``timeout_s``, and stop the thread; whether it stopped."""
        deadline = time.monotonic() + timeout_s
        while not self.idle and self.is_alive() and not self.stalled and time.monotonic() < deadline:
            time.sleep(_MIN_POLL_S)
        self._ending = True
        self._awake()
        self.join(max(0.0, deadline - time.monotonic()) + _MAX_POLL_S)
        return not self.is_alive()

    # ------------------------------------------------------------------------------------------ the link thread

    def tasks(self) -> list[Task]:
        """What the thread does, as generators that are given turns: started, they hold all of its state."""
        return [self._do_chores(), self._read_board(), self._write_words(), self._upload(), self._download()]

    def run(self) -> None:
        """Give each task its turn until the end."""
        try:
            tasks = self.tasks()
            while not self._ending:
                busy = [next(task) for task in tasks]
                poll_s = min(max(self._step_s / 8, _MIN_POLL_S), _MAX_POLL_S)
                self._asleep.acquire(timeout=_BUSY_POLL_S if any(busy) else poll_s)
        except BaseException as error:
            self.failure = error
            log.exception("%s: the link thread has failed; the learner saves its state and ends", self._who)

    def _do_chores(self) -> Task:
        while True:
            while self._chores:
                self._chores[0]()
                self._chores.popleft()  # afterwards, since it counts as waiting until it is done
            yield False

    def _read_board(self) -> Task:
        """Read the down board again and again; its answer is also the ping that allows a Flush."""
        g = self._geometry
        words = np.zeros(g.down_board_words, dtype=np.uint64)
        into = words.view(np.uint8)
        heartbeat, last, is_written = 0, b"", False
        while True:
            self._pings += 1
            ping = self._pings
            # The answer vouches for what was started before the ping, so nothing new is started until it is there. (A
            # Flush of MPI's would wait for the target: if that stops just then, the training thread stands still.)
            is_quiet = self._moving == 0
            self._settling = is_quiet and self._unflushed
            pending = self._window.get(0, into)
            yield from self._until(pending)
            if self.stalled:
                self.stalled = False
                log.info("%s: the link to the syncer moves again", self._who)
            raw = words.tobytes()
            if raw != last or not is_written:
                last = raw
                board = Board.from_words(words, g.num_slots)
                # The syncer writes its heartbeat last, so what is read after one was seen is no board of zeros, on
                # which nothing would hold a learner back.
                is_written = heartbeat > 0
                if board.heartbeat != heartbeat:
                    heartbeat, self.heard_s = board.heartbeat, time.monotonic()
                if is_written:
                    self.board, self.board_words = board, words.copy()
            if self._settling:
                self._settling = self._unflushed = False
                self._window.flush()
            if is_quiet:
                self._flushed_ping = ping
            yield bool(self._flush_wanted)

    def _until(self, pending: Pending) -> Task:
        """Wait for an operation by polling; notes a stall, once: the board may answer while a piece does not move."""
        started = time.monotonic()
        noted = False
        while not pending.test():
            if not noted and time.monotonic() - started > self._stall_s:
                noted = self.stalled = True
                self.num_stalls += 1
                log.warning(
                    "%s: the link to the syncer has not moved for %.0f s; training goes on", self._who, self._stall_s
                )
            yield True

    def _flushed(self) -> Task:
        """Wait until everything started before this call has arrived at the target."""
        mark = self._pings  # a ping started later than this one answers after our operations were started
        self._unflushed = True
        self._flush_wanted += 1
        while self._flushed_ping <= mark:
            yield True
        self._flush_wanted -= 1

    def _piece(self, start: Callable[[], Pending]) -> Task:
        while self._flush_wanted or self._settling or self.stalled or self._words_have_waited():
            yield True
        self._moving += 1
        yield from self._until(start())
        self._moving -= 1

    def _words_have_waited(self) -> bool:
        return self._unflushed and time.monotonic() - self._unflushed_s > _FLUSH_WITHIN_S

    def _write(self, offset: int, value: int) -> None:
        self._window.write_word(offset, value)
        if not self._unflushed:
            self._unflushed, self._unflushed_s = True, time.monotonic()

    def _write_words(self) -> Task:
        beat_offset = self._geometry.heartbeat_word(self._rank)
        offsets = [self._geometry.up_word(index) for index in (STEPS, TOKENS, LOSS, STATE)]
        while True:
            if not (self.stalled or self._settling):
                progress, before = self._progress, self._written_words
                if progress is not None and progress is not self._written_progress:
                    steps, tokens, loss, state = progress
                    words = [steps, tokens, _FLOAT_BITS.unpack(_FLOAT.pack(loss))[0], state]
                    for index, value in enumerate(words):
                        if not before or before[index] != value:
                            self._write(offsets[index], value)
                    self._written_progress, self._written_words = progress, words
                now = time.monotonic()
                if now >= self._next_beat_s:
                    self._beats += 1
                    self._next_beat_s = now + _BEAT_S
                    self._words[beat_offset] = self._beats
                for offset in list(self._words):  # a copy: the training thread may add meanwhile
                    self._write(offset, self._words.pop(offset))
            yield False

    def _upload(self) -> Task:
        while True:
            if not self._uploads:
                yield False
                continue
            upload = self._uploads[0]
            yield from self._send(upload)
            self._uploads.popleft()

    def _cancelled(self, upload: Upload) -> bool:
        # An outcome of a later round says it too: the line's word was written again before this thread looked, and the
        # learner answers on a line only after it has seen what became of its answer before.
        outcome = self.board.outcomes[upload.line] if self.board else 0
        return outcome >> 32 > upload.round or outcome == (upload.round << 32 | NOT_MERGED)

    def _send(self, upload: Upload) -> Task:
        """Header and payload, Flush, commit word, Flush."""
        g, slot = self._geometry, self._geometry.up_slot(upload.line)
        found, payload = upload.encode()
        floats_at = slot + g.down_header_bytes + 8 * upload.num_counters
        low, _ = g.slice_bytes(upload.num_elements, self._rank)
        crc = 0
        if found is not None:
            header = np.frombuffer(found.to_bytes(), dtype=np.uint8)
            counters = upload.counters.view(np.uint8)
            yield from self._piece(lambda: self._window.put(slot, header))
            if counters.nbytes:
                yield from self._piece(lambda: self._window.put(slot + g.down_header_bytes, counters))
            crc = checksum(counters, checksum(header))
            assert header.nbytes == HEADER_BYTES
        for start in range(0, payload.nbytes, PIECE_BYTES):
            if self._cancelled(upload):
                return
            piece = payload[start : start + PIECE_BYTES]
            offset = floats_at + low + start
            yield from self._piece(lambda offset=offset, piece=piece: self._window.put(offset, piece))  # type: ignore[misc]
        crc = checksum(payload, crc)
        yield from self._flushed()
        if self._cancelled(upload):
            return  # its snapshot may be in use again: the payload may not be whole
        self._write(g.commit_word(upload.line, self._rank), upload.round << 32 | crc)
        yield from self._flushed()

    def _download(self) -> Task:
        """Fetch published fragments strictly in order of their sequence numbers."""
        g = self._geometry
        while True:
            sequence = self.received_sequence + 1
            slot = (sequence - 1) % g.num_slots
            word = self.board.down_commits[slot] if self.board else 0
            if word >> 32 != sequence & 0xFFFFFFFF or len(self._arrivals) >= self._max_arrivals:
                yield False
                continue
            yield from self._fetch(sequence, slot, word & 0xFFFFFFFF)

    def _fetch(self, sequence: int, slot: int, header_crc: int) -> Task:
        g, base = self._geometry, self._geometry.down_slot(slot)
        raw = np.empty(g.down_header_bytes, dtype=np.uint8)
        yield from self._piece(lambda: self._window.get(base, raw))
        if checksum(raw) != header_crc:
            yield from self._again(f"header of fragment update {sequence}")
            return
        header = DownHeader.from_bytes(raw, g)
        if header.run_token != self._run_token:
            raise TransportError(
                f"a published fragment must be of run {self._run_token:x}; got one of run {header.run_token:x}"
            )
        fragment = self._layout.fragments[header.fragment]
        counters = np.empty(header.num_counters, dtype=np.int64)
        at = base + g.down_header_bytes
        if counters.nbytes:
            yield from self._piece(lambda: self._window.get(at, counters.view(np.uint8)))
        encoded = self._wire_buffer(fragment.num_elements)
        raw_floats = encoded.view(np.uint8)
        at += counters.nbytes
        low, high = g.slice_bytes(header.num_elements, self._rank)
        for start in range(low, high, PIECE_BYTES):
            piece = raw_floats[start : min(start + PIECE_BYTES, high)]
            yield from self._piece(lambda start=start, piece=piece: self._window.get(at + start, piece))  # type: ignore[misc]
        found = (checksum(counters), checksum(raw_floats[low:high]))
        if found != (header.checksums[0], header.checksums[1 + self._rank]):
            yield from self._again(f"fragment {header.fragment} version {header.version}")
            return
        if self._gather is not None:
            bounds = [g.slice_bytes(header.num_elements, rank) for rank in range(g.num_ranks)]
            mine = raw_floats[low:high].copy()
            joined = self._gather.start(mine, raw_floats, bounds)
            while not joined.test():  # a mate that is late is no stall of the link to the syncer
                yield True
        floats = self._decode(encoded)
        self._arrivals.append(
            Arrival(
                sequence,
                header.fragment,
                header.version,
                header.step,
                header.contains_round,
                floats,
                counters,
            )
        )
        self.received_sequence = sequence
        self._words[g.ack_word(slot, self._rank)] = sequence

    def _again(self, what: str) -> Task:
        """A damaged read: the slot still lies there unacknowledged, so read it again a little later."""
        self.num_damaged += 1
        log.warning("%s: checksum of %s is wrong; it is read again", self._who, what)
        until = time.monotonic() + _BEAT_S
        while time.monotonic() < until:
            yield False

    def _wire_buffer(self, num_elements: int) -> NDArray[np.float32] | NDArray[np.uint16]:
        if WIRE_BYTES[self._geometry.wire] == 4:
            return self._pool.take(num_elements)
        return np.empty(num_elements, dtype=WIRE_DTYPE[self._geometry.wire])

    def _decode(self, encoded: NDArray[np.float32] | NDArray[np.uint16]) -> NDArray[np.float32]:
        if encoded.dtype == np.float32:
            return encoded  # type: ignore[return-value]
        floats = self._pool.take(len(encoded))
        decode_bf16(encoded, floats)  # type: ignore[arg-type]
        return floats
