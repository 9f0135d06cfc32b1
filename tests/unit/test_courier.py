"""The link thread against a window in which nothing is sure to arrive before a flush; the commit rule (rules 9-14)."""

from __future__ import annotations

import random
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from local_link import RUN_TOKEN, DiedError, LocalWindow, Mailbox, patterns

import pyddl.link.courier as courier_module
from pyddl.core.kernels import decode_bf16, encode_bf16
from pyddl.errors import TransportError
from pyddl.link.courier import Arrival
from pyddl.link.mailbox import ANNOUNCED, MERGED, NOT_MERGED, pack


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The couriers' clock, set by hand."""
    fake = SimpleNamespace(now=1000.0, sleep=time.sleep)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(courier_module, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces per slice, so that there is something to stop between."""
    monkeypatch.setattr(courier_module, "PIECE_BYTES", 64)


def commits(box: Mailbox) -> tuple[tuple[int, int], ...]:
    reading = box.port.read()
    return () if reading is None else reading.commits


# ---------------------------------------------------------------- the commit rule


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_courier_writer_that_dies_between_any_two_operations_is_never_half_seen(num_ranks: int, seed: int):
    """The slot holds a merged contribution; its successor's writer (any rank) ends after its k-th call, for every k."""
    k = 0
    was_complete = False
    while not was_complete:
        rng = random.Random(f"{seed}/{k}")
        box = Mailbox(num_ranks=num_ranks, num_slots=1, sizes=(150,), num_counters=2, rng=rng)
        source = patterns(150)
        box.submit(1, next(source))
        box.until(lambda box=box: commits(box) == ((0, 1),), "the first contribution")
        box.port.verify(0, 1)
        box.port.resolve(0, 1, MERGED)
        box.turns(6)
        victim = rng.randrange(num_ranks)
        second = next(source)
        box.submit(2, second)
        box.windows[victim].lifetime = k
        alive = set(range(num_ranks))
        seen = False
        for _ in range(150):
            for rank in sorted(alive, key=lambda _: rng.random()):
                try:
                    box.turn(rank)
                except DiedError:
                    alive.remove(rank)
                for window in box.windows:
                    window.drift()  # what a dead writer had started may still arrive
                if (0, 2) in commits(box):
                    seen = True
                    contribution = box.port.verify(0, 2)  # raises if anything of it is not there
                    np.testing.assert_array_equal(contribution.floats, second)
                    assert contribution.counters.tolist() == [2, 3]
        was_complete = seen
        assert was_complete or victim not in alive, "it appears unless its writer died"
        k += 1
        assert k < 200
    # header, counters, pieces and a commit word at least, not counting reads of the board and flushes
    assert k > 4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_courier_random_interleavings_deliver_every_contribution_whole_and_once(num_ranks: int, seed: int):
    """Writers, reader and network in random order; three slots, reused as soon as their outcome is written."""
    rng = random.Random(seed)
    box = Mailbox(num_ranks=num_ranks, num_slots=3, sizes=(70,), num_counters=1, rng=rng, num_tests=2)
    source = patterns(70)
    sent: dict[int, np.ndarray] = {}
    on_line: dict[int, int] = {}
    received: list[int] = []
    for _ in range(6000):
        if len(received) == 12:
            break
        for line in range(3):
            if line not in on_line and len(sent) < 12 and rng.random() < 0.3:
                round_id = len(sent) + 1
                sent[round_id] = next(source)
                on_line[line] = round_id
                box.submit(round_id, sent[round_id], line=line)
        box.turn(rng.randrange(num_ranks))
        if rng.random() < 0.3:
            for line, round_id in commits(box):
                assert on_line[line] == round_id
                contribution = box.port.verify(line, round_id)
                np.testing.assert_array_equal(contribution.floats, sent[round_id])
                received.append(round_id)
                box.port.resolve(line, round_id, MERGED)
                del on_line[line]
    assert sorted(received) == list(range(1, 13))


@pytest.mark.parametrize("num_tests", [0, 1, 3])
def test_courier_payload_is_flushed_before_the_commit_word_is_written(num_tests: int):
    box = Mailbox(num_counters=2, num_tests=num_tests)
    box.turns(4)
    window, g = box.windows[0], box.geometry
    window.record.clear()
    box.submit(3, next(patterns(40)))
    box.until(lambda: commits(box) == ((0, 3),), "the commit")
    calls = [(name, offset) for what, name, offset in window.record if what == "called"]
    last_put = max(i for i, (name, _) in enumerate(calls) if name == "put")
    commit = calls.index(("word", g.commit_word(0, 0)))
    assert ("flush", 0) in calls[last_put:commit]
    assert ("flush", 0) in calls[commit:], "the commit word is flushed as well"
    assert calls.count(("word", g.commit_word(0, 0))) == 1


def test_courier_encodes_only_when_the_upload_is_sent_and_once():
    box = Mailbox()
    calls = []
    box.submit(1, next(patterns(40)))
    upload = box.couriers[0]._uploads[0]
    encode = upload.encode
    upload.encode = lambda: calls.append(1) or encode()
    box.until(lambda: commits(box) == ((0, 1),), "the commit")
    assert calls == [1]


# ---------------------------------------------------------------- flush and stall


def test_courier_flushes_only_after_an_answer_and_never_while_a_piece_moves():
    """Both directions busy. LocalWindow.flush checks each flush; here only that there were many, under traffic."""
    box = Mailbox(num_slots=2, sizes=(150, 150), rng=random.Random(5), num_tests=4)
    for round_id in range(1, 9):
        box.submit(round_id, next(patterns(150)), line=round_id % 2)
        box.publish(round_id % 2, round_id, next(patterns(150)))
        box.until(lambda: bool(commits(box)), f"contribution {round_id}", most=5000)
        box.pump()
    assert len(box.windows[0].calls("flush")) >= 8, "at least one for each payload"
    assert box.couriers[0].received_sequence >= 4


@pytest.mark.parametrize("stuck", ["put", "get"])
def test_courier_operation_that_never_completes_stalls_the_link_which_starts_nothing_new(
    stuck: str, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    box = Mailbox(stall_s=5.0)
    courier, window = box.couriers[0], box.windows[0]
    box.turns(4)
    window.stuck = {stuck, "get"}  # a dead network answers the board no more, either
    box.submit(1, next(patterns(40)))
    box.turns(10)
    clock.now += 4.9
    box.turns(2)
    assert not courier.stalled
    clock.now += 0.2
    box.turns(2)
    assert courier.stalled
    window.record.clear()
    for _ in range(50):
        clock.now += 1.0
        courier.announce(1, pack(9, 0, ANNOUNCED))
        box.turns(1)
    assert window.record == [], "neither words, beats, pieces nor a flush"
    assert courier.heard_s < clock.now - 50
    window.stuck = set()
    box.until(lambda: commits(box) == ((0, 1),), "the contribution, after the stall")
    assert not courier.stalled
    assert [r.message for r in caplog.records if "has not moved" in r.message][1:] == [] or stuck == "put"


def test_courier_stalled_link_starts_no_upload_and_no_fetch(clock: SimpleNamespace):
    box = Mailbox(stall_s=5.0, sizes=(40, 40))
    box.turns(4)
    box.windows[0].stuck = {"get"}
    box.turns(4)
    clock.now += 6
    box.turns(2)
    assert box.couriers[0].stalled
    box.windows[0].record.clear()
    box.submit(1, next(patterns(40)))
    box.publish(1, 1, next(patterns(40)))
    box.turns(50)
    assert box.windows[0].record == []
    box.windows[0].stuck = set()
    box.until(lambda: commits(box) == ((0, 1),), "the contribution")
    box.until(lambda: box.couriers[0].received_sequence == 1, "the fragment")


def test_courier_flush_of_an_upload_does_not_wait_for_the_end_of_a_long_fetch():
    """Pieces of the fetch pause for it; else a large fragment on its way down would hold up what goes up."""
    box = Mailbox(sizes=(4000, 20), num_tests=2)
    small = 1 if box.layout.fragments[1].num_elements == 20 else 0
    box.publish(1 - small, 1, next(patterns(4000)))
    box.turns(12)
    box.submit(1, next(patterns(20)), fragment=small)
    box.until(lambda: commits(box) == ((0, 1),), "the contribution", most=100)
    assert box.couriers[0].received_sequence == 0, "the fetch is not yet through"


def test_courier_words_are_flushed_within_a_twentieth_of_a_second_during_a_long_fetch(clock: SimpleNamespace):
    """The data plane must not starve heartbeats and announcements: live peers would be declared dead."""
    box = Mailbox(sizes=(6000,), num_tests=2)
    box.turns(4)
    box.publish(0, 1, next(patterns(6000)))
    beats = []
    for turn in range(600):
        clock.now += 0.005
        if turn == 200:
            box.couriers[0].announce(1, pack(9, 0, ANNOUNCED))
        box.turns(1)
        reading = box.port.read()
        if reading is not None and reading.beating:
            beats.append(turn)
        if reading is not None and reading.answers:
            assert reading.answers == ((1, 9, False),)
            assert turn < 200 + 20
            break
    else:
        pytest.fail("the announcement did not come")
    assert box.couriers[0].received_sequence == 0, "the fetch is not yet through"
    assert len(beats) >= 7, "one every 20 turns"


def test_courier_piece_that_does_not_move_while_the_board_answers_is_noted_once(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    """A slow link answers small reads while 4 MiB take their time: no warning a millisecond."""
    box = Mailbox(stall_s=5.0)
    box.turns(4)
    box.windows[0].stuck = {"put"}
    box.submit(1, next(patterns(40)))
    for _ in range(300):
        clock.now += 0.1
        box.turns(1)
    assert box.couriers[0].num_stalls == 1
    assert len([r for r in caplog.records if "has not moved" in r.message]) == 1
    assert not box.couriers[0].stalled, "the board answers, so words are written"
    reading = box.port.read()
    assert reading is None or not reading.commits
    box.windows[0].stuck = set()
    box.until(lambda: commits(box) == ((0, 1),), "the contribution")


def test_courier_mate_that_is_late_with_its_slice_is_no_stall(clock: SimpleNamespace):
    box = Mailbox(num_ranks=2, sizes=(80,))
    box.publish(0, 1, next(patterns(80)))
    for _ in range(200):
        clock.now += 1.0
        box.beat()
        box.turn(0)  # rank 1 gets no turn
    assert box.couriers[0].num_stalls == 0
    assert box.couriers[0].received_sequence == 0
    box.until(lambda: all(c.received_sequence == 1 for c in box.couriers), "the fragment")


def test_courier_heartbeat_of_the_syncer_is_heard_only_when_it_changes(clock: SimpleNamespace):
    box = Mailbox()
    box.beat()
    box.turns(4)
    heard = box.couriers[0].heard_s
    clock.now += 7
    box.turns(10)  # the memory answers although nobody lives behind it
    assert box.couriers[0].heard_s == heard
    box.beat()
    box.turns(10)
    assert box.couriers[0].heard_s == clock.now


def test_courier_board_that_was_never_written_is_no_board():
    """A board of zeros says "no limit": in lock-step a learner would run away before the syncer's first word."""
    box = Mailbox(beating=False, num_slots=2)
    box.port.ask(0, pack(1, 0, 0))
    box.turns(20)
    assert box.couriers[0].board is None
    assert box.couriers[0].board_words is None
    box.beat(limit_step=3)
    box.turns(6)
    board = box.couriers[0].board
    assert board is not None
    assert (board.limit_step, board.heartbeat) == (3, 1)


def test_courier_beats_every_tenth_of_a_second(clock: SimpleNamespace):
    box = Mailbox()
    g = box.geometry
    for _ in range(100):
        clock.now += 0.01
        box.turns(1)
    beats = box.windows[0].calls("word").count(g.heartbeat_word(0))
    assert 9 <= beats <= 11


# ---------------------------------------------------------------- cancelling


def test_courier_upload_that_was_refused_stops_and_never_commits():
    box = Mailbox(sizes=(600,))
    box.beat()
    box.turns(4)
    box.submit(1, next(patterns(600)))
    box.turns(8)
    started = len(box.windows[0].calls("put"))
    assert 0 < started < 38, "it is under way"
    box.port.resolve(0, 1, NOT_MERGED)
    box.turns(40)
    assert len(box.windows[0].calls("put")) < 38
    assert box.couriers[0].idle or not box.couriers[0]._uploads
    assert commits(box) == ()
    second = next(patterns(600)) * 2
    box.submit(2, second)
    box.until(lambda: commits(box) == ((0, 2),), "the next contribution in the same slot")
    np.testing.assert_array_equal(box.port.verify(0, 2).floats, second)


def test_courier_upload_refused_before_its_turn_is_still_encoded_but_sends_no_payload():
    """The encoder does the learner's bookkeeping, so it must run; the slot may be asked for again by then."""
    box = Mailbox()
    box.beat()
    box.port.resolve(0, 1, NOT_MERGED)
    box.turns(4)
    ran = []
    box.submit(1, next(patterns(40)))
    upload = box.couriers[0]._uploads[0]
    encode = upload.encode
    upload.encode = lambda: ran.append(1) or encode()
    box.turns(40)
    assert ran == [1]
    assert commits(box) == ()


def test_courier_outcome_of_an_earlier_round_does_not_cancel():
    box = Mailbox()
    box.port.resolve(0, 1, NOT_MERGED)
    box.beat()
    box.turns(4)
    box.submit(2, next(patterns(40)))
    box.until(lambda: commits(box) == ((0, 2),), "the contribution")


def test_courier_refused_by_one_rank_late_by_the_other_is_no_contribution():
    """Rank 1 has committed before it reads the refusal, rank 0 has not: the ranks never agree."""
    box = Mailbox(num_ranks=2, sizes=(600,))
    box.beat()
    box.turns(4)
    box.submit(1, next(patterns(600)))
    while 1 << 32 > int(box.memory[box.geometry.commit_word(0, 1) :][:8].view(np.uint64)[0]):
        box.turn(1)
    box.port.resolve(0, 1, NOT_MERGED)
    box.turns(60)
    assert commits(box) == ()
    third = next(patterns(600)) + 5
    box.submit(3, third)
    box.until(lambda: commits(box) == ((0, 3),), "the next contribution")
    np.testing.assert_array_equal(box.port.verify(0, 3).floats, third)


# ---------------------------------------------------------------- fetching


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_courier_published_fragments_arrive_whole_in_order_on_every_rank(num_ranks: int, wire: str):
    rng = random.Random(11)
    box = Mailbox(num_ranks=num_ranks, wire=wire, sizes=(90, 90, 90), num_counters=2, rng=rng, num_tests=2)
    source = patterns(90)
    sent = []
    held: list[list[Arrival]] = [[] for _ in range(num_ranks)]
    for version in (1, 2):
        for p in range(3):
            floats = next(source) + np.float32(0.1)
            wired = floats
            if wire == "bf16":
                wired = np.empty(90, dtype=np.uint16)
                encode_bf16(floats, None, wired)
                decode_bf16(wired, floats)
            box.publish(p, version, wired, step=10 * version, contains=version + p)
            sent.append((p, version, floats))
            number = len(sent)
            box.until(lambda number=number: all(c.received_sequence == number for c in box.couriers), f"{p, version}")
            box.until(lambda: all(c.idle for c in box.couriers), "the acknowledgements")
            box.pump()
            for mine, courier in zip(held, box.couriers, strict=True):
                mine.extend(courier.arrivals(100))
                courier.taken(courier.arrivals(100))
    for arrivals in held:
        assert [a.sequence for a in arrivals] == [1, 2, 3, 4, 5, 6]
        for arrival, (p, version, floats) in zip(arrivals, sent, strict=True):
            assert (arrival.fragment, arrival.version, arrival.step) == (p, version, 10 * version)
            assert arrival.contains_round == version + p
            np.testing.assert_array_equal(arrival.floats, floats)
            assert arrival.floats.dtype == np.float32
            assert arrival.counters.tolist() == ([version, version + 1] if p == 0 else [])
    assert box.port.downlink.idle


def test_courier_random_interleavings_of_publishing_and_fetching_never_tear():
    """Three fragments are published again and again while two ranks fetch at their own pace."""
    for seed in range(8):
        rng = random.Random(seed)
        box = Mailbox(num_ranks=2, sizes=(70, 70, 70), rng=rng, num_tests=2)
        newest = {}
        for version in range(1, 200):
            p = rng.randrange(3)
            floats = np.full(70, 1000 * p + version, dtype=np.float32)
            box.publish(p, version, floats)
            newest[p] = version
            for _ in range(rng.randrange(12)):
                box.turn(rng.randrange(2))
            box.pump()
            for courier in box.couriers:
                arrivals = courier.arrivals(10**9)
                for a in arrivals:
                    assert set(a.floats.tolist()) == {1000.0 * a.fragment + a.version}
                if rng.random() < 0.5:
                    courier.taken(arrivals)
        last: dict[int, int] = {}
        for _ in range(4000):
            if box.port.downlink.idle:
                break
            box.turns(1)
            box.pump()
            arrivals = box.couriers[0].arrivals(10**9)
            last |= {a.fragment: a.version for a in arrivals}
            for courier in box.couriers:
                courier.taken(courier.arrivals(10**9))
        assert box.port.downlink.idle
        assert all(newest[p] == version for p, version in last.items()), "the newest version is the last to arrive"


@pytest.mark.parametrize("part", ["header", "counters", "payload"])
def test_courier_damaged_read_is_noticed_and_read_again(part: str, clock: SimpleNamespace):
    box = Mailbox(num_counters=2)
    g = box.geometry
    floats = next(patterns(40))
    box.publish(0, 1, floats)
    at = g.down_slot(0) + {"header": 0, "counters": g.down_header_bytes, "payload": g.down_header_bytes + 16}[part]
    box.windows[0].corrupt_next_get_at = at
    box.until(lambda: box.couriers[0].num_damaged == 1, "the damage")
    assert box.couriers[0].received_sequence == 0
    assert not box.couriers[0].arrivals(10)
    clock.now += 1
    box.until(lambda: box.couriers[0].received_sequence == 1, "the second reading")
    (arrival,) = box.couriers[0].arrivals(10)
    np.testing.assert_array_equal(arrival.floats, floats)


def test_courier_damage_on_one_rank_keeps_the_group_together(clock: SimpleNamespace):
    box = Mailbox(num_ranks=2, sizes=(80, 80))
    low, _ = box.geometry.slice_bytes(80, 1)
    box.windows[1].corrupt_next_get_at = box.geometry.down_slot(0) + box.geometry.down_header_bytes + low
    box.publish(0, 1, np.full(80, 1, dtype=np.float32))
    box.publish(1, 1, np.full(80, 2, dtype=np.float32))
    box.turns(40)
    assert [c.received_sequence for c in box.couriers] == [0, 0]
    clock.now += 1
    box.until(lambda: all(c.received_sequence == 2 for c in box.couriers), "both fragments")
    for courier in box.couriers:
        assert [set(a.floats.tolist()) for a in courier.arrivals(10)] == [{1.0}, {2.0}]


def test_courier_fragment_of_a_foreign_run_ends_the_link(caplog: pytest.LogCaptureFixture):
    box = Mailbox()
    box.port = box.new_port(run_token=RUN_TOKEN + 1)
    box.publish(0, 1, next(patterns(40)))
    with pytest.raises(TransportError, match=f"must be of run {RUN_TOKEN:x}"):
        box.turns(40)


def test_courier_arrivals_nobody_takes_are_bounded():
    box = Mailbox(sizes=(40, 40))
    for version in range(1, 12):
        for p in range(2):
            box.publish(p, version, next(patterns(40)))
            box.turns(20)
            box.pump()
    assert len(box.couriers[0].arrivals(100)) == 4, "the fragments and the slots"
    taken = box.couriers[0].arrivals(100)[:2]
    box.couriers[0].taken(taken)
    box.turns(20)
    assert len(box.couriers[0].arrivals(100)) == 4


def test_courier_arrivals_up_to_a_sequence_leaves_the_later_ones():
    box = Mailbox(sizes=(40, 40))
    box.publish(0, 1, next(patterns(40)))
    box.publish(1, 1, next(patterns(40)))
    box.until(lambda: box.couriers[0].received_sequence == 2, "both")
    courier = box.couriers[0]
    assert [a.sequence for a in courier.arrivals(1)] == [1]
    courier.taken(courier.arrivals(1))
    assert [a.sequence for a in courier.arrivals(2)] == [2]


# ---------------------------------------------------------------- as a thread


def report(box: Mailbox, number: int) -> None:
    box.couriers[0].report(state=1, step=number, num_steps=number, tokens=number, loss=0.5)


def test_courier_thread_writes_what_was_reported_last_and_ends():
    box = Mailbox()
    courier = box.couriers[0]
    courier.start()
    box.beat()
    for number in range(1, 200):
        report(box, number)
    assert courier.end(5.0)
    assert courier.failure is None
    reading = box.port.read()
    assert reading is not None
    assert (reading.step, reading.num_steps, reading.tokens, reading.loss) == (199, 199, 199, 0.5)
    assert courier.idle


def test_courier_words_added_by_the_training_thread_while_they_are_written_do_not_end_the_link():
    """The dictionary of words grows between any two instructions of the link thread."""
    box = Mailbox(num_slots=32, num_tests=0)
    courier = box.couriers[0]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        courier.start()
        until = time.monotonic() + 0.5
        number = 0
        while time.monotonic() < until and courier.is_alive():
            number += 1
            for line in range(32):
                courier.announce(line, pack(number, line, ANNOUNCED))
            courier.boundary_done(0.01)
    finally:
        sys.setswitchinterval(interval)
    assert courier.failure is None
    assert courier.end(5.0)
    reading = box.port.read()
    assert reading is not None
    assert {round_id for _, round_id, _ in reading.answers} == {number}


def test_courier_end_of_a_stalled_link_is_bounded():
    box = Mailbox(stall_s=0.05)
    box.windows[0].stuck = {"get", "put"}
    courier = box.couriers[0]
    courier.start()
    report(box, 1)
    started = time.monotonic()
    while not courier.stalled and time.monotonic() - started < 5:
        time.sleep(0.005)
    courier.end(2.0)
    assert time.monotonic() - started < 5
    assert not courier.is_alive()


def test_courier_window_that_fails_ends_the_link_and_nothing_waits_for_it(caplog: pytest.LogCaptureFixture):
    box = Mailbox()

    class Broken(LocalWindow):
        def get(self, offset, out):
            raise RuntimeError("the network card is gone")

    courier = box.couriers[0]
    courier._window = Broken(box.memory)
    courier.start()
    courier.join(5)
    assert not courier.is_alive()
    assert str(courier.failure) == "the network card is gone"
    assert "the link thread has failed" in caplog.text
    report(box, 1)
    courier.announce(0, pack(1, 0, ANNOUNCED))
    courier.boundary_done(0.01)
    assert courier.end(0.1), "nothing waits for a thread that is gone"
    assert threading.current_thread() is threading.main_thread()
