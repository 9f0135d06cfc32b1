"""Chores, small words during long payloads, uploads that were refused some rounds ago, whose messages they are."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
from local_link import Mailbox, patterns

import pyddl.link.courier as courier_module
from pyddl.link.mailbox import ANNOUNCED, NOT_MERGED, pack


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The couriers' clock, set by hand."""
    fake = SimpleNamespace(now=1000.0, sleep=time.sleep)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(courier_module, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "PIECE_BYTES", 64)


@pytest.mark.parametrize("both_ways", [False, True])
def test_courier_word_written_during_a_long_payload_arrives_between_its_pieces(both_ways: bool, clock: SimpleNamespace):
    """A piece is moving whenever the board answers, so without a gap made for it no Flush could ever be called.

    LocalWindow checks each Flush: after an answer of the board, while nothing moves.
    """
    box = Mailbox(num_slots=2, sizes=(8000, 8000), num_tests=5)
    box.turns(6)
    box.submit(1, next(patterns(8000)))
    if both_ways:
        box.publish(1, 1, next(patterns(8000)))
    courier, window = box.couriers[0], box.windows[0]
    box.turns(20)
    assert len(window.calls("put")) > 1, "the payload is under way"
    waits_s = []
    for number in range(2, 8):
        word = pack(number, 1, ANNOUNCED)
        courier.announce(1, word)
        asked_s = clock.now
        for _ in range(200):
            clock.now += 0.002
            box.turns(1)
            reading = box.port.read()
            if reading is not None and (1, number, False) in reading.answers:
                break
        waits_s.append(clock.now - asked_s)
    assert len(window.calls("put")) < 500, "the payload is still under way"
    assert max(waits_s) < 0.15
    flushes = len(window.calls("flush"))
    assert flushes < len(window.calls("put")), "a payload is not flushed piece by piece"
    box.until(lambda: (r := box.port.read()) is not None and (0, 1) in r.commits, "the contribution", most=20000)


def test_courier_upload_refused_before_a_later_round_on_its_line_stops_as_well():
    """The line's outcome word names the later round by the time this thread looks."""
    box = Mailbox(sizes=(600,))
    box.beat()
    box.turns(4)
    courier, window = box.couriers[0], box.windows[0]
    box.submit(1, next(patterns(600)))
    box.turns(8)
    second = next(patterns(600)) * 2
    box.submit(2, second)  # the learner has seen the refusal of 1 and answers again
    box.port.resolve(0, 1, NOT_MERGED)
    box.port.resolve(0, 2, NOT_MERGED)
    box.turns(80)
    assert len(window.calls("put")) < 38, "neither payload was sent to its end"
    assert not courier._uploads
    assert box.geometry.commit_word(0, 0) not in window.calls("word")
    third = next(patterns(600)) * 3
    box.submit(3, third)
    box.until(lambda: (r := box.port.read()) is not None and (0, 3) in r.commits, "the contribution")
    np.testing.assert_array_equal(box.port.verify(0, 3).floats, third)


def test_courier_messages_say_whose_link_it_is(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture):
    """The ranks of a world often share one output."""
    caplog.set_level(logging.INFO)
    box = Mailbox(num_ranks=2, stall_s=5.0)
    box.turns(4)
    box.windows[1].stuck = {"get"}
    box.turns(2)
    clock.now += 6
    box.turns(2)
    box.windows[1].stuck = set()
    box.turns(4)
    box.windows[0].corrupt_next_get_at = box.geometry.down_slot(0)
    box.publish(0, 1, next(patterns(40)))
    box.turns(10)
    broken = box.couriers[1]
    broken._window = None  # type: ignore[assignment]
    broken.run()
    messages = [r.getMessage() for r in caplog.records]
    assert [m.split(": ")[0] for m in messages] == [
        "learner 3 rank 1",
        "learner 3 rank 1",
        "learner 3 rank 0",
        "learner 3 rank 1",
    ], messages


def test_courier_chore_is_done_in_the_link_thread_and_counts_as_waiting_until_it_is():
    box = Mailbox()
    courier = box.couriers[0]
    box.turns(4)
    seen: list[bool] = []
    courier.do_soon(lambda: seen.append(courier.idle))
    assert not courier.idle
    box.turns(1)
    assert seen == [False]
    box.until(lambda: courier.idle, "nothing left")
