"""The syncer's side of one mailbox: plain loads and stores in its own memory.

Here: reading the up board, checking a complete contribution, writing round, outcome and clock words, and the downlink
with its two slots and its set of dirty fragments. Not here: MPI (the syncer's side makes no call but to drive
progress), decisions (core/protocol.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.kernels import checksum, copy_with_checksum, load_word, load_words, store_word
from ..errors import TransportError
from .mailbox import (
    ANNOUNCED,
    DECLINED,
    DOWN_WORDS,
    HEADER_BYTES,
    UP_WORDS,
    WIRE_DTYPE,
    DownHeader,
    Geometry,
    UpHeader,
    unpack,
)
from .probe import SyncerProbe

__all__ = ["Contribution", "LearnerPort", "Published", "Reading"]


@dataclass(frozen=True)
class Contribution:
    """A verified contribution; the arrays are views of the mailbox, valid until its outcome is written."""

    header: UpHeader
    floats: NDArray[np.float32] | NDArray[np.uint16]
    counters: NDArray[np.int64]


@dataclass
class Published:
    """One version of one fragment as it goes on the wire; shared by all learners, never changed."""

    fragment: int
    version: int
    step: int
    floats: NDArray[np.float32] | NDArray[np.uint16]
    counters: NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """What one look at the up board has found."""

    state: int
    step: int
    num_steps: int
    tokens: int
    loss: float
    beating: bool  # every rank of the group has beaten since the last look that said so
    answers: tuple[tuple[int, int, bool], ...]  # (line, round, declined), each reported once
    commits: tuple[tuple[int, int], ...]  # (line, round), each reported once, when all ranks agree


class LearnerPort:
    """One learner's mailbox, seen from the syncer.

    Args:
        memory: [geometry.total_bytes] uint8, the mailbox.
        geometry: its shape.
        learner_id: whose it is.
        incarnation: of which of its lives.
        run_token: 64 random bits of this run; contributions of another run are refused.
        fence: makes remote writes visible to local loads and the reverse (Win.Sync).
        copier: runs the copies of the downlink.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        geometry: Geometry,
        *,
        learner_id: int,
        incarnation: int,
        run_token: int,
        fence: Callable[[], None],
        copier: Executor,
    ) -> None:
        if memory.nbytes < geometry.total_bytes:
            raise TransportError(
                f"the mailbox of learner {learner_id} must have {geometry.total_bytes} bytes; got {memory.nbytes}"
            )
        self.memory = memory
        self.geometry = geometry
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.downlink = Downlink(self, copier)
        self._run_token = run_token
        self._fence = fence
        slots, ranks = geometry.num_slots, geometry.num_ranks
        self._words = np.zeros(len(geometry.up_offsets), dtype=np.uint64)
        self._seen_answers = [0] * slots
        self._seen_commits = [0] * slots
        self._seen_beats = [0] * ranks
        self._split = np.cumsum([slots * ranks, slots, slots * ranks, ranks])
        self._last: list[int] = []

    def new_probe(self) -> SyncerProbe:
        """The syncer's side of the probe of words, before anything else uses the mailbox."""
        g = self.geometry
        up = [g.heartbeat_word(rank) for rank in range(g.num_ranks)]
        return SyncerProbe(self.memory, up, g.down_word(0), self._fence)

    # -- reading

    def read(self) -> Reading | None:
        """Look at the up board once; None if not a single word has changed since the last look."""
        load_words(self.memory, self.geometry.up_offsets, self._words)
        values = self._words.tolist()
        if values == self._last:
            return None
        self._last = values
        a, b, c, d = (int(i) for i in self._split)
        commits, answers, acks, beats = values[:a], values[a:b], values[b:c], values[c:d]
        state, steps, tokens, loss = values[d : d + UP_WORDS]
        self.downlink.note_acks(acks)
        return Reading(
            state,
            steps >> 32,
            steps & 0xFFFFFFFF,
            tokens,
            float(np.uint64(loss).view(np.float64)),
            self._note_beats(beats),
            tuple(self._new_answers(answers)),
            tuple(self._new_commits(commits)),
        )

    def _note_beats(self, beats: list[int]) -> bool:
        moved = all(new != old for new, old in zip(beats, self._seen_beats, strict=True))
        if moved:
            self._seen_beats = beats
        return moved

    def _new_answers(self, words: list[int]) -> list[tuple[int, int, bool]]:
        found = []
        for line, word in enumerate(words):
            if word != self._seen_answers[line]:
                self._seen_answers[line] = word
                round_id, _, answer = unpack(word)
                if answer in (ANNOUNCED, DECLINED):
                    found.append((line, round_id, answer == DECLINED))
        return found

    def _new_commits(self, words: list[int]) -> list[tuple[int, int]]:
        found = []
        ranks = self.geometry.num_ranks
        for line in range(self.geometry.num_slots):
            rounds = {word >> 32 for word in words[line * ranks : (line + 1) * ranks]}
            round_id = rounds.pop()
            if not rounds and round_id not in (0, self._seen_commits[line]):
                self._seen_commits[line] = round_id
                found.append((line, round_id))
        return found

    def verify(self, line: int, round_id: int) -> Contribution:
        """Check a committed slot and return its content.

        Raises:
            TransportError: if header, lengths or a checksum are wrong; the sentence says which.
        """
        self._fence()
        g, base = self.geometry, self.geometry.up_slot(line)
        header_raw = self.memory[base : base + HEADER_BYTES]
        try:
            header = UpHeader.from_bytes(header_raw)
        except ValueError as error:
            raise TransportError(f"contribution of learner {self.learner_id}: {error}") from None
        wanted = (self._run_token, round_id, self.incarnation)
        if (header.run_token, header.round, header.incarnation) != wanted:
            raise TransportError(
                f"a contribution of learner {self.learner_id} must carry run, round and incarnation {wanted}; "
                f"got {(header.run_token, header.round, header.incarnation)}"
            )
        if header.num_elements > g.num_elements or header.num_counters > g.num_counters:
            raise TransportError(
                f"a contribution must fit its slot ({g.num_elements} floats, {g.num_counters} counters); "
                f"got {header.num_elements} and {header.num_counters}"
            )
        start = base + g.down_header_bytes
        counters = self.memory[start : start + 8 * header.num_counters]
        start += counters.nbytes
        dtype = WIRE_DTYPE[g.wire]
        floats = self.memory[start : start + header.num_elements * dtype.itemsize]
        first = checksum(counters, checksum(header_raw))
        for rank in range(g.num_ranks):
            low, high = g.slice_bytes(header.num_elements, rank)
            crc = checksum(floats[low:high], first if rank == 0 else 0)
            commit = load_word(self.memory, g.commit_word(line, rank))
            if commit != (round_id << 32 | crc):
                raise TransportError(
                    f"the checksum of rank {rank}'s part of round {round_id} must be {commit & 0xFFFFFFFF:08x}; "
                    f"got {crc:08x}"
                )
        return Contribution(header, floats.view(dtype), counters.view(np.int64))

    # -- writing

    def ask(self, line: int, word: int) -> None:
        """Put a round on a line of the board; 0 takes it off."""
        store_word(self.memory, self.geometry.round_word(line), word)

    def resolve(self, line: int, round_id: int, outcome: int) -> None:
        """Write the outcome of a round; the learner may use the slot again."""
        self._fence()
        store_word(self.memory, self.geometry.outcome_word(line), round_id << 32 | outcome)

    def write_board(
        self,
        *,
        heartbeat: int,
        step: int,
        stop_step: int | None,
        phase: int,
        tokens: int,
        limit_step: int | None,
        checkpoint_step: int | None = None,
    ) -> None:
        """Write the plain words of the down board; the heartbeat last, since it says that the others are there."""
        stop, limit, checkpoint = (0 if x is None else x + 1 for x in (stop_step, limit_step, checkpoint_step))
        words = (heartbeat, step, stop, phase, tokens, limit, checkpoint)
        assert len(words) == DOWN_WORDS
        for index in reversed(range(DOWN_WORDS)):
            store_word(self.memory, self.geometry.down_word(index), words[index])


class Downlink:
    """Published fragments on their way to one learner: the newest version of each only, longest waiting first.

    A slot that has not been acknowledged by every rank is never overwritten.
    """

    def __init__(self, port: LearnerPort, copier: Executor) -> None:
        self._port = port
        self._copier = copier
        self._dirty: dict[int, None] = {}  # fragment, in order of waiting
        self._sequence = 0
        self._acked = [0] * port.geometry.num_slots  # highest sequence that every rank has taken from the slot
        self._copy: Future[tuple[int, int]] | None = None
        self._sent: dict[int, tuple[int, int, float]] = {}  # sequence -> fragment, version, time of commit
        self.contains: dict[int, int] = {}  # fragment -> last round in which this learner's contribution was merged
        self.received: list[tuple[int, int, float]] = []  # (fragment, version, seconds from commit), for the trace

    @property
    def idle(self) -> bool:
        """Whether everything published has been taken by the learner."""
        return not self._dirty and self._copy is None and not self._sent

    def offer(self, fragment: int) -> None:
        """A fragment has a new version; it keeps its place if it waits already."""
        self._dirty.setdefault(fragment, None)

    def note_acks(self, words: list[int]) -> None:
        """Take in the acknowledgement words, S x G of them."""
        ranks = self._port.geometry.num_ranks
        for slot in range(self._port.geometry.num_slots):
            taken = min(words[slot * ranks : (slot + 1) * ranks])
            self._acked[slot] = max(self._acked[slot], taken)
            sent = self._sent.pop(taken, None)
            if sent is not None:
                fragment, version, since = sent
                self.received.append((fragment, version, time.monotonic() - since))

    def pump(self, newest: Callable[[int], Published]) -> None:
        """Start or finish one copy into a free slot; never blocks."""
        if self._copy is not None:
            if not self._copy.done():
                return
            sequence, word = self._copy.result()
            self._copy = None
            g = self._port.geometry
            store_word(self._port.memory, g.down_commit_word((sequence - 1) % g.num_slots), word)
        if not self._dirty:
            return
        slots = self._port.geometry.num_slots
        slot, last_here = self._sequence % slots, self._sequence + 1 - slots
        if last_here > self._acked[slot]:
            return  # the learner has not yet taken what lies there
        fragment = next(iter(self._dirty))
        del self._dirty[fragment]
        self._sequence += 1
        item = newest(fragment)
        self._sent[self._sequence] = (fragment, item.version, time.monotonic())
        self._copy = self._copier.submit(self._write, self._sequence, slot, item, self.contains.get(fragment, 0))

    def _write(self, sequence: int, slot: int, item: Published, contains_round: int) -> tuple[int, int]:
        g, memory = self._port.geometry, self._port.memory
        start = g.down_slot(slot) + g.down_header_bytes
        checksums = [copy_with_checksum(item.counters.view(np.uint8), memory[start : start + item.counters.nbytes])]
        start += item.counters.nbytes
        raw = item.floats.view(np.uint8)
        for rank in range(g.num_ranks):
            low, high = g.slice_bytes(len(item.floats), rank)
            checksums.append(copy_with_checksum(raw[low:high], memory[start + low : start + high]))
        header = DownHeader(
            run_token=self._port._run_token,
            sequence=sequence,
            fragment=item.fragment,
            version=item.version,
            step=item.step,
            contains_round=contains_round,
            num_elements=len(item.floats),
            num_counters=len(item.counters),
            checksums=tuple(checksums),
        ).to_bytes(g)
        at = g.down_slot(slot)
        memory[at : at + len(header)] = np.frombuffer(header, dtype=np.uint8)
        return sequence, sequence << 32 | checksum(np.frombuffer(header, dtype=np.uint8))
