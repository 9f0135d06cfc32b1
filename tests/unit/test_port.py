"""The syncer's side of a mailbox: what it sees, what it believes, and when it writes again into a down slot."""

from __future__ import annotations

import math

import numpy as np
import pytest
from local_link import RUN_TOKEN, Mailbox, patterns

from pyddl.core.kernels import store_word
from pyddl.errors import TransportError
from pyddl.link.mailbox import (
    ANNOUNCED,
    DECLINED,
    DOWN_WORDS,
    LOSS,
    MERGED,
    STATE,
    STEPS,
    TOKENS,
    TRAINING,
    Board,
    DownHeader,
    pack,
    unpack,
)


def word(box: Mailbox, offset: int) -> int:
    return int(box.memory[offset : offset + 8].view(np.uint64)[0])


def beat(box: Mailbox, *values: int) -> None:
    for rank, value in enumerate(values):
        store_word(box.memory, box.geometry.heartbeat_word(rank), value)


def uploaded(**options: object) -> tuple[Mailbox, np.ndarray]:
    """A mailbox in which a whole contribution to round 5 lies."""
    box = Mailbox(**options)  # type: ignore[arg-type]
    floats = next(patterns(40))
    if box.geometry.wire == "bf16":
        floats = floats.astype(np.uint16)
    box.submit(5, floats)
    box.until(lambda: (r := box.port.read()) is not None and bool(r.commits), "the commit")
    return box, floats


# ---------------------------------------------------------------- reading


def test_port_read_of_an_unchanged_board_is_none():
    box = Mailbox()
    assert box.port.read() is not None, "the first look always says something"
    assert box.port.read() is None
    store_word(box.memory, box.geometry.up_word(TOKENS), 1)
    assert box.port.read() is not None
    assert box.port.read() is None


def test_port_read_progress_words_are_decoded():
    box = Mailbox()
    g = box.geometry
    loss = int(np.float64(2.5).view(np.uint64))
    for index, value in ((STATE, TRAINING), (STEPS, 33 << 32 | 21), (TOKENS, 2**40), (LOSS, loss)):
        store_word(box.memory, g.up_word(index), value)
    reading = box.port.read()
    assert reading is not None
    assert (reading.state, reading.step, reading.num_steps, reading.tokens) == (TRAINING, 33, 21, 2**40)
    assert reading.loss == 2.5


def test_port_read_nan_loss_stays_nan():
    box = Mailbox()
    store_word(box.memory, box.geometry.up_word(LOSS), int(np.float64(math.nan).view(np.uint64)))
    reading = box.port.read()
    assert reading is not None
    assert math.isnan(reading.loss)


def test_port_heartbeat_counts_only_when_every_rank_has_moved():
    box = Mailbox(num_ranks=3)
    beats = []
    for values in ((1, 1, 0), (2, 1, 1), (2, 2, 1), (3, 2, 2), (9, 9, 2), (9, 9, 3)):
        beat(box, *values)
        reading = box.port.read()
        assert reading is not None
        beats.append(reading.beating)
    # 1: rank 2 never beat; 2: all have; 3, 4: against (2,1,1) rank 0 and 1 moved at 4, rank 2 at 4; 5: rank 2 stands
    assert beats == [False, True, False, True, False, True]


def test_port_answers_are_reported_once_and_tell_declined_from_announced():
    box = Mailbox()
    g = box.geometry
    store_word(box.memory, g.announcement_word(0), pack(4, 0, ANNOUNCED))
    store_word(box.memory, g.announcement_word(1), pack(5, 1, DECLINED))
    reading = box.port.read()
    assert reading is not None
    assert reading.answers == ((0, 4, False), (1, 5, True))
    beat(box, 1)
    reading = box.port.read()
    assert reading is not None
    assert reading.answers == ()
    store_word(box.memory, g.announcement_word(1), pack(5, 1, ANNOUNCED))  # it has something to give after all
    reading = box.port.read()
    assert reading is not None
    assert reading.answers == ((1, 5, False),)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_port_commit_is_reported_once_and_only_when_all_ranks_agree(num_ranks: int):
    box = Mailbox(num_ranks=num_ranks)
    g = box.geometry
    for rank in range(num_ranks):
        reading = box.port.read()
        assert reading is None or reading.commits == ()
        store_word(box.memory, g.commit_word(1, rank), 6 << 32 | rank)
    reading = box.port.read()
    assert reading is not None
    assert reading.commits == ((1, 6),)
    beat(box, *[1] * num_ranks)
    reading = box.port.read()
    assert reading is not None
    assert reading.commits == ()


def test_port_commits_of_different_rounds_are_no_contribution():
    box = Mailbox(num_ranks=2)
    store_word(box.memory, box.geometry.commit_word(0, 0), 7 << 32 | 1)
    store_word(box.memory, box.geometry.commit_word(0, 1), 6 << 32 | 1)
    reading = box.port.read()
    assert reading is not None
    assert reading.commits == ()


# ---------------------------------------------------------------- verifying


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_port_verify_whole_contribution_gives_its_content(num_ranks: int, wire: str):
    box, floats = uploaded(num_ranks=num_ranks, wire=wire, num_counters=2)
    fences = box.num_fences
    contribution = box.port.verify(0, 5)
    assert contribution.header.round == 5
    assert contribution.header.c_tokens == 500
    np.testing.assert_array_equal(contribution.floats, floats)
    assert contribution.floats.dtype == floats.dtype
    assert contribution.counters.tolist() == [5, 6]
    assert box.num_fences > fences, "remote writes are made visible before they are read"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_port_verify_one_flipped_bit_anywhere_is_found(num_ranks: int):
    box, floats = uploaded(num_ranks=num_ranks, num_counters=2)
    g = box.geometry
    at = g.up_slot(0) + g.down_header_bytes
    places = [g.up_slot(0) + 8 * field for field in range(11)]  # every field of the header
    places += [at, at + 8, at + 16, at + 16 + floats.nbytes // 2, at + 16 + floats.nbytes - 1]
    places += [g.commit_word(0, rank) for rank in range(num_ranks)]
    for place in places:
        box.memory[place] ^= 0x04
        with pytest.raises(TransportError, match=r"magic|must carry|must fit|checksum"):
            box.port.verify(0, 5)
        box.memory[place] ^= 0x04
    box.port.verify(0, 5)


def test_port_verify_contribution_of_another_run_is_refused():
    box, _ = uploaded()
    stranger = box.new_port(run_token=RUN_TOKEN + 1)
    with pytest.raises(TransportError, match="must carry run, round and incarnation"):
        stranger.verify(0, 5)


def test_port_verify_contribution_of_another_incarnation_is_refused():
    box, _ = uploaded()
    successor = box.new_port(incarnation=2)
    with pytest.raises(TransportError, match="learner 3 must carry run, round and incarnation"):
        successor.verify(0, 5)


def test_port_verify_contribution_of_another_round_is_refused():
    box, _ = uploaded()
    with pytest.raises(TransportError, match="must carry"):
        box.port.verify(0, 6)


@pytest.mark.parametrize("field", ["num_elements", "num_counters"])
def test_port_verify_header_that_names_more_than_the_slot_holds_is_refused(field: str):
    box = Mailbox(num_counters=1)
    box.submit(5, next(patterns(40)), **{field: 10**9})
    box.until(lambda: (r := box.port.read()) is not None and bool(r.commits), "the commit")
    with pytest.raises(TransportError, match="must fit its slot"):
        box.port.verify(0, 5)


def test_port_memory_that_is_too_small_is_refused():
    box = Mailbox()
    box.memory = box.memory[:-1]
    with pytest.raises(TransportError, match=r"mailbox of learner 3 must have \d+ bytes"):
        box.new_port()


# ---------------------------------------------------------------- writing


def test_port_write_board_comes_back_as_the_learner_reads_it():
    box = Mailbox()
    box.port.write_board(heartbeat=1, step=2, stop_step=0, phase=1, tokens=2**40, limit_step=None)
    box.port.ask(1, pack(9, 0, 4))
    box.port.resolve(0, 8, MERGED)
    words = box.memory[: 8 * box.geometry.down_board_words].view(np.uint64)
    board = Board.from_words(words, 2)
    assert (board.heartbeat, board.step, board.stop_step, board.phase) == (1, 2, 0, 1)
    assert (board.tokens, board.limit_step) == (2**40, None)
    assert unpack(board.rounds[1]) == (9, 0, 4)
    assert board.outcomes == (8 << 32 | MERGED, 0)
    box.port.ask(1, 0)
    assert word(box, box.geometry.round_word(1)) == 0


def test_port_write_board_stores_the_heartbeat_last(monkeypatch: pytest.MonkeyPatch):
    """Who sees the first heartbeat must find the other words written."""
    box = Mailbox(beating=False)
    stored = []
    monkeypatch.setattr("pyddl.link.port.store_word", lambda memory, offset, value: stored.append(offset))
    box.beat(step=3)
    assert sorted(stored) == [box.geometry.down_word(i) for i in range(DOWN_WORDS)]
    assert stored[-1] == box.geometry.down_word(0)


# ---------------------------------------------------------------- the downlink


def sequences(box: Mailbox) -> list[int]:
    return [word(box, box.geometry.down_commit_word(slot)) >> 32 for slot in range(box.geometry.num_slots)]


def in_slot(box: Mailbox, slot: int) -> DownHeader:
    g = box.geometry
    return DownHeader.from_bytes(box.memory[g.down_slot(slot) :][: g.down_header_bytes], g)


def acknowledge(box: Mailbox, sequence: int, *ranks: int) -> None:
    slot = (sequence - 1) % box.geometry.num_slots
    for rank in ranks:
        store_word(box.memory, box.geometry.ack_word(slot, rank), sequence)


def test_downlink_slot_is_not_written_before_every_rank_has_acknowledged_it():
    box = Mailbox(num_ranks=2, sizes=(40, 40, 40))
    for p in range(3):
        box.publish(p, 1, next(patterns(40)))
    before = box.memory.copy()
    assert sequences(box) == [1, 2]
    acknowledge(box, 1, 0)
    box.pump()
    assert sequences(box) == [1, 2], "rank 1 may still be reading slot 0"
    at = box.geometry.down_slot(0)
    np.testing.assert_array_equal(box.memory[at:], before[at:])
    acknowledge(box, 1, 1)
    box.pump()
    assert sequences(box) == [3, 2]
    assert in_slot(box, 0).fragment == 2


def test_downlink_of_several_versions_only_the_newest_is_sent():
    box = Mailbox(sizes=(40, 40, 40))
    for p in (0, 1):
        box.publish(p, 1, next(patterns(40)))
    for version in (1, 2, 3):
        box.publish(2, version, np.full(40, version, dtype=np.float32))
    acknowledge(box, 1, 0)
    box.pump()
    assert (in_slot(box, 0).fragment, in_slot(box, 0).version) == (2, 3)
    acknowledge(box, 2, 0)
    acknowledge(box, 3, 0)
    box.pump()
    assert box.port.downlink.idle, "versions 1 and 2 are never sent"


def test_downlink_sends_what_has_waited_longest_although_it_became_newer():
    box = Mailbox(sizes=(40, 40, 40, 40))
    for p in (0, 1):
        box.publish(p, 1, next(patterns(40)))
    box.publish(3, 1, next(patterns(40)))
    box.publish(2, 1, next(patterns(40)))
    box.publish(3, 2, next(patterns(40)))  # keeps its place
    acknowledge(box, 1, 0)
    acknowledge(box, 2, 0)
    box.pump()
    box.pump()
    assert [(in_slot(box, s).fragment, in_slot(box, s).version) for s in (0, 1)] == [(3, 2), (2, 1)]


def test_downlink_header_names_the_last_round_that_contains_this_learner():
    box = Mailbox(sizes=(40, 40))
    box.publish(0, 1, next(patterns(40)), contains=12)
    box.publish(1, 1, next(patterns(40)))
    assert (in_slot(box, 0).contains_round, in_slot(box, 1).contains_round) == (12, 0)


def test_downlink_commit_word_comes_only_after_the_copy():
    box = Mailbox()

    class Slow:
        def __init__(self) -> None:
            self.finish = lambda: None
            self.ready = False

        def submit(self, fn, *args):
            self.run = lambda: fn(*args)
            return self

        def done(self) -> bool:
            return self.ready

        def result(self):
            return self.value

    slow = Slow()
    box.port = box.new_port(copier=slow)
    box.publish(0, 1, next(patterns(40)))
    assert sequences(box) == [0, 0]
    slow.value, slow.ready = slow.run(), True
    assert sequences(box) == [0, 0]
    assert not box.port.downlink.idle
    box.pump()
    assert sequences(box) == [1, 0]


def test_downlink_received_tells_fragment_version_and_a_duration():
    box = Mailbox(sizes=(40, 40))
    box.publish(1, 4, next(patterns(40)))
    assert not box.port.downlink.idle
    acknowledge(box, 1, 0)
    box.port.read()
    ((fragment, version, seconds),) = box.port.downlink.received
    assert (fragment, version) == (1, 4)
    assert seconds >= 0
    assert box.port.downlink.idle
