"""The memory layout of a learner's mailbox, and the rules by which its words are written and read.

Here: offsets, word formats, headers; nothing moves in this file. Not here: who copies what when (port.py is the
syncer's side, courier.py the learner's), MPI (world.py).

A mailbox lies in the syncer's memory. The learner writes the *up* part with one-sided operations, the syncer the *down*
part with local stores. Only single aligned 8-byte words are taken as untorn, so what belongs together is one word or
lies in a header covered by a checksum, and each word has exactly one writer:

    down board   heartbeat, clock, stop, phase, tokens, limit, checkpoint | S rounds | S outcomes | S down commits
    up board     state, steps, tokens, loss | G heartbeats | S announcements | S x G commits | S x G acknowledgements
    S up slots   header, counters, floats (outer gradient)     S down slots   header, counters, floats (Theta_p)

    steps                t_m 32 | inner steps really made 32
    round word           round 32 | fragment 16 | base version 16 (its low bits)       0: nothing is asked
    announcement         round 32 | fragment 16 | answer 16                            one writer: the learner's rank 0
    commit               round 32 | CRC32C of the rank's part 32                       one writer: that rank
    outcome              round 32 | outcome 32        also the acknowledgement: the slot may be used again
    down commit          sequence 32 | CRC32C of the header 32
    acknowledgement      sequence 64                                                   one writer: that rank

Order of an upload: payload and header, Flush, commit word of each rank, Flush. It is complete when all G ranks have
committed the same round; a writer may die at any instruction before that and nothing is seen. A slot is written again
only after its outcome word names the round that it held. Line j of the board asks for slot j.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.layout import slice_bounds

__all__ = [
    "ANNOUNCED",
    "DECLINED",
    "DOWN_WORDS",
    "HEADER_BYTES",
    "MERGED",
    "NOT_MERGED",
    "Board",
    "DownHeader",
    "Geometry",
    "UpHeader",
    "pack",
    "unpack",
]

WORD = 8
HEADER_BYTES = 128
ANNOUNCED, DECLINED = 1, 2
MERGED, NOT_MERGED = 1, 2
TRAINING, CLOSING, LEFT = 1, 2, 3
# The last: as after a loss, and this learner has not taken all that was published.
RUNNING, DRAINING, FINISHED, FINISHED_AFTER_LOSS, FINISHED_WITHOUT = 0, 1, 2, 3, 4
DOWN_WORDS = 7  # heartbeat, clock, stop, phase, tokens, limit, checkpoint
UP_WORDS = 4  # state, steps (t_m 32 | inner steps made 32), tokens, loss
STATE, STEPS, TOKENS, LOSS = range(UP_WORDS)
WIRE_BYTES = {"f32": 4, "bf16": 2}
WIRE_DTYPE: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}
_MAGIC = 0x70796464_6C303031  # "pyddl001"
_PAGE = 4096


def pack(high: int, middle: int, low: int) -> int:
    """One word from 32, 16 and 16 bits; ``middle`` and ``low`` are taken modulo 2^16."""
    return (high & 0xFFFFFFFF) << 32 | (middle & 0xFFFF) << 16 | (low & 0xFFFF)


def unpack(word: int) -> tuple[int, int, int]:
    """The 32, 16 and 16 bits of :func:`pack`."""
    return word >> 32, word >> 16 & 0xFFFF, word & 0xFFFF


@dataclass(frozen=True)
class Geometry:
    """The shape of a mailbox; equal on both sides, or the set-up refuses.

    Attributes:
        num_slots: S, rounds that can be in flight, and slots in each direction.
        num_ranks: G.
        num_elements: floats of the largest fragment.
        num_counters: 8-byte integers of the fragment that has most.
        wire: f32 or bf16.
    """

    num_slots: int
    num_ranks: int
    num_elements: int
    num_counters: int
    wire: str

    @property
    def down_board_words(self) -> int:
        """Words of the down board, read by the learner in one Rget."""
        return DOWN_WORDS + 3 * self.num_slots

    @property
    def up_board_words(self) -> int:
        """Words of the up board."""
        return UP_WORDS + self.num_ranks + self.num_slots * (1 + 2 * self.num_ranks)

    @property
    def up_board_offset(self) -> int:
        """Byte offset of the up board; boards are kept on lines of their own."""
        return _round_up(self.down_board_words * WORD, 64)

    @property
    def slots_offset(self) -> int:
        """Byte offset of up slot 0."""
        return _round_up(self.up_board_offset + self.up_board_words * WORD, _PAGE)

    @property
    def down_header_bytes(self) -> int:
        """A down header carries, after its fixed part, G + 1 checksums (counters, then each slice)."""
        return _round_up(HEADER_BYTES + 8 * (self.num_ranks + 1), 64)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of either direction."""
        payload = self.num_counters * 8 + self.num_elements * WIRE_BYTES[self.wire]
        return _round_up(self.down_header_bytes + payload, _PAGE)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mailbox."""
        return self.slots_offset + 2 * self.num_slots * self.slot_bytes

    # word offsets in bytes, from the start of the mailbox

    def down_word(self, index: int) -> int:
        """Word ``index`` of the down board."""
        return index * WORD

    def round_word(self, line: int) -> int:
        """The round asked on a line."""
        return (DOWN_WORDS + line) * WORD

    def outcome_word(self, line: int) -> int:
        """The outcome of what slot ``line`` held."""
        return (DOWN_WORDS + self.num_slots + line) * WORD

    def down_commit_word(self, slot: int) -> int:
        """The commit of a down slot."""
        return (DOWN_WORDS + 2 * self.num_slots + slot) * WORD

    def up_word(self, index: int) -> int:
        """STATE, STEPS, TOKENS or LOSS (the bits of a float64)."""
        return self.up_board_offset + index * WORD

    def heartbeat_word(self, rank: int) -> int:
        """The heartbeat of a rank of the group."""
        return self.up_board_offset + (UP_WORDS + rank) * WORD

    def announcement_word(self, line: int) -> int:
        """The learner's answer to the round on a line."""
        return self.up_board_offset + (UP_WORDS + self.num_ranks + line) * WORD

    def commit_word(self, line: int, rank: int) -> int:
        """A rank's commit of up slot ``line``."""
        base = UP_WORDS + self.num_ranks + self.num_slots
        return self.up_board_offset + (base + line * self.num_ranks + rank) * WORD

    def ack_word(self, slot: int, rank: int) -> int:
        """A rank's acknowledgement of down slot ``slot``."""
        base = UP_WORDS + self.num_ranks + self.num_slots * (1 + self.num_ranks)
        return self.up_board_offset + (base + slot * self.num_ranks + rank) * WORD

    def up_slot(self, line: int) -> int:
        """Byte offset of an up slot."""
        return self.slots_offset + line * self.slot_bytes

    def down_slot(self, slot: int) -> int:
        """Byte offset of a down slot."""
        return self.slots_offset + (self.num_slots + slot) * self.slot_bytes

    def slice_bytes(self, num_elements: int, rank: int) -> tuple[int, int]:
        """The slice of a rank within a fragment's encoded floats, in bytes."""
        start, stop = slice_bounds(num_elements, self.num_ranks, rank)
        return start * WIRE_BYTES[self.wire], stop * WIRE_BYTES[self.wire]

    @cached_property
    def up_offsets(self) -> NDArray[np.int64]:
        """Offsets of all up words, commits first: the order in which the syncer reads them.

        A learner writes its progress before it commits, so a reader that loads commits first never sees a commit
        whose progress it has not seen.
        """
        commits = [self.commit_word(j, g) for j in range(self.num_slots) for g in range(self.num_ranks)]
        announcements = [self.announcement_word(j) for j in range(self.num_slots)]
        acks = [self.ack_word(j, g) for j in range(self.num_slots) for g in range(self.num_ranks)]
        heartbeats = [self.heartbeat_word(g) for g in range(self.num_ranks)]
        words = [self.up_word(i) for i in range(UP_WORDS)]
        return np.array([*commits, *announcements, *acks, *heartbeats, *words], dtype=np.int64)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Board:
    """The down board as a learner has read it; each word is untorn, the set of words is not a cut."""

    heartbeat: int
    step: int
    stop_step: int | None
    phase: int
    tokens: int
    limit_step: int | None
    checkpoint_step: int | None  # of the newest checkpoint that the syncer has begun
    rounds: tuple[int, ...]
    outcomes: tuple[int, ...]
    down_commits: tuple[int, ...]

    @classmethod
    def from_words(cls, words: NDArray[np.uint64], num_slots: int) -> Board:
        """Interpret ``[down_board_words]`` uint64."""
        values = words.tolist()
        lists = [tuple(values[DOWN_WORDS + i * num_slots : DOWN_WORDS + (i + 1) * num_slots]) for i in range(3)]
        heartbeat, step, stop, phase, tokens, limit, checkpoint = values[:DOWN_WORDS]
        optional = (stop - 1 if stop else None, limit - 1 if limit else None, checkpoint - 1 if checkpoint else None)
        return cls(heartbeat, step, optional[0], phase, tokens, optional[1], optional[2], *lists)


_UP_FIELDS = (
    "magic run_token round fragment base_version step c_steps c_tokens incarnation num_elements num_counters"
).split()
_DOWN_FIELDS = "magic run_token sequence fragment version step contains_round num_elements num_counters".split()


@dataclass(frozen=True)
class UpHeader:
    """What a contribution says of itself; covered by rank 0's commit checksum."""

    run_token: int
    round: int
    fragment: int
    base_version: int
    step: int
    c_steps: int
    c_tokens: int
    incarnation: int
    num_elements: int
    num_counters: int

    def to_bytes(self) -> bytes:
        """The HEADER_BYTES bytes of the slot's header."""
        return _header(_UP_FIELDS, self)

    @classmethod
    def from_bytes(cls, raw: NDArray[np.uint8]) -> UpHeader:
        """Read a header back.

        Raises:
            ValueError: if it is not an up header of this version.
        """
        return cls(**_parse(_UP_FIELDS, raw))


@dataclass(frozen=True)
class DownHeader:
    """What a published fragment says of itself; covered by the down-commit word.

    ``contains_round`` is the last round in which a contribution of *this* learner to this fragment was merged, 0: none.
    """

    run_token: int
    sequence: int
    fragment: int
    version: int
    step: int
    contains_round: int
    num_elements: int
    num_counters: int
    checksums: tuple[int, ...]

    def to_bytes(self, geometry: Geometry) -> bytes:
        """The ``geometry.down_header_bytes`` bytes of the slot's header."""
        raw = _header(_DOWN_FIELDS, self) + np.array(self.checksums, dtype="<u8").tobytes()
        return raw.ljust(geometry.down_header_bytes, b"\0")

    @classmethod
    def from_bytes(cls, raw: NDArray[np.uint8], geometry: Geometry) -> DownHeader:
        """Read a header back.

        Raises:
            ValueError: if it is not a down header of this version.
        """
        end = HEADER_BYTES + 8 * (geometry.num_ranks + 1)
        checksums = tuple(int(c) for c in raw[HEADER_BYTES:end].view("<u8"))
        return cls(**_parse(_DOWN_FIELDS, raw), checksums=checksums)


def _header(fields: list[str], header: object) -> bytes:
    values = [_MAGIC, *(getattr(header, name) for name in fields[1:])]
    return np.array(values, dtype="<u8").tobytes().ljust(HEADER_BYTES, b"\0")


def _parse(fields: list[str], raw: NDArray[np.uint8]) -> dict[str, int]:
    values = dict(zip(fields, (int(v) for v in raw[: 8 * len(fields)].view("<u8")), strict=True))
    if values.pop("magic") != _MAGIC:
        raise ValueError("the header does not start with this version's magic word")
    return values
