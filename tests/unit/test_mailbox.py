"""The mailbox's layout: where words and slots lie, and what a word or a header says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyddl.link.mailbox import (
    DOWN_WORDS,
    HEADER_BYTES,
    UP_WORDS,
    WIRE_BYTES,
    WORD,
    Board,
    DownHeader,
    Geometry,
    UpHeader,
    pack,
    unpack,
)

GEOMETRIES = st.builds(
    Geometry,
    num_slots=st.integers(1, 64),
    num_ranks=st.integers(1, 20),
    num_elements=st.integers(1, 100_000),
    num_counters=st.integers(0, 50),
    wire=st.sampled_from(["f32", "bf16"]),
)
UP = UpHeader(
    run_token=2**63 - 1,
    round=1,
    fragment=2,
    base_version=3,
    step=4,
    c_steps=5,
    c_tokens=2**40,
    incarnation=7,
    num_elements=8,
    num_counters=9,
)


def down_words(g: Geometry) -> list[int]:
    lines = range(g.num_slots)
    words = [g.down_word(i) for i in range(DOWN_WORDS)]
    return words + [at(j) for at in (g.round_word, g.outcome_word, g.down_commit_word) for j in lines]


def up_words(g: Geometry) -> list[int]:
    lines, ranks = range(g.num_slots), range(g.num_ranks)
    words = [g.up_word(i) for i in range(UP_WORDS)] + [g.heartbeat_word(r) for r in ranks]
    words += [g.announcement_word(j) for j in lines]
    return words + [at(j, r) for at in (g.commit_word, g.ack_word) for j in lines for r in ranks]


@settings(max_examples=60, deadline=None)
@given(GEOMETRIES)
def test_geometry_words_and_slots_have_places_of_their_own(g: Geometry):
    down, up = down_words(g), up_words(g)
    assert len(set(down)) == len(down) == g.down_board_words
    assert sorted(down) == [WORD * i for i in range(len(down))], "one Rget from 0 reads the whole down board"
    assert sorted(up) == [g.up_board_offset + WORD * i for i in range(g.up_board_words)]
    assert g.up_board_offset >= WORD * g.down_board_words
    assert g.up_board_offset % 64 == 0, "words of different writers share no cache line"
    slots = [g.up_slot(j) for j in range(g.num_slots)] + [g.down_slot(j) for j in range(g.num_slots)]
    assert slots[0] >= g.up_board_offset + WORD * g.up_board_words
    assert slots == [slots[0] + i * g.slot_bytes for i in range(2 * g.num_slots)]
    assert slots[-1] + g.slot_bytes == g.total_bytes
    assert g.down_header_bytes + 8 * g.num_counters + g.num_elements * WIRE_BYTES[g.wire] <= g.slot_bytes
    assert g.down_header_bytes >= HEADER_BYTES + 8 * (g.num_ranks + 1)


@settings(max_examples=60, deadline=None)
@given(GEOMETRIES, st.data())
def test_geometry_slices_of_all_ranks_cover_the_payload_once(g: Geometry, data: st.DataObject):
    num_elements = data.draw(st.integers(0, g.num_elements))
    bounds = [g.slice_bytes(num_elements, rank) for rank in range(g.num_ranks)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements * WIRE_BYTES[g.wire]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))


def test_geometry_up_offsets_read_commits_before_progress():
    g = Geometry(2, 3, 100, 1, "f32")
    offsets = g.up_offsets.tolist()
    assert sorted(offsets) == sorted(up_words(g)), "every up word is read once"
    commits = {g.commit_word(j, r) for j in range(2) for r in range(3)}
    assert set(offsets[: len(commits)]) == commits
    assert offsets[-UP_WORDS:] == [g.up_word(i) for i in range(UP_WORDS)]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_pack_values_in_range_come_back(high: int, middle: int, low: int):
    word = pack(high, middle, low)
    assert 0 <= word < 2**64
    assert unpack(word) == (high, middle, low)


def test_pack_version_beyond_16_bits_keeps_its_low_bits():
    assert unpack(pack(9, 3, 0x1_0002)) == (9, 3, 2)


def test_board_words_are_interpreted_by_their_place():
    g = Geometry(2, 1, 10, 0, "f32")
    words = np.zeros(g.down_board_words, dtype=np.uint64)
    for index, value in enumerate((11, 22, 31, 1, 44, 51, 62)):
        words[index] = value
    words[g.round_word(1) // WORD] = 61
    words[g.outcome_word(0) // WORD] = 71
    words[g.down_commit_word(1) // WORD] = 2**64 - 1
    assert Board.from_words(words, 2) == Board(11, 22, 30, 1, 44, 50, 61, (0, 61), (71, 0), (0, 2**64 - 1))


def test_board_stop_at_step_zero_is_not_no_stop():
    words = np.zeros(DOWN_WORDS + 3, dtype=np.uint64)
    assert Board.from_words(words, 1).stop_step is None
    assert Board.from_words(words, 1).limit_step is None
    assert Board.from_words(words, 1).checkpoint_step is None
    words[[2, 5, 6]] = 1
    assert Board.from_words(words, 1).stop_step == 0
    assert Board.from_words(words, 1).limit_step == 0
    assert Board.from_words(words, 1).checkpoint_step == 0


def test_up_header_comes_back_and_fits_its_bytes():
    raw = np.frombuffer(UP.to_bytes(), dtype=np.uint8)
    assert raw.nbytes == HEADER_BYTES
    assert UpHeader.from_bytes(raw) == UP


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_down_header_comes_back_with_a_checksum_for_each_rank(num_ranks: int):
    g = Geometry(2, num_ranks, 10, 0, "bf16")
    header = DownHeader(1, 2, 3, 4, 5, 6, 7, 8, tuple(range(100, 101 + num_ranks)))
    raw = np.frombuffer(header.to_bytes(g), dtype=np.uint8)
    assert raw.nbytes == g.down_header_bytes
    assert DownHeader.from_bytes(raw, g) == header


def test_header_of_empty_memory_or_another_version_is_refused():
    raw = np.frombuffer(UP.to_bytes(), dtype=np.uint8).copy()
    raw[0] ^= 1
    for bad in (raw, np.zeros(HEADER_BYTES, dtype=np.uint8)):
        with pytest.raises(ValueError, match="magic word"):
            UpHeader.from_bytes(bad)
