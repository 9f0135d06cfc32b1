"""The user's loop, close(), lock-step, and learners of several ranks (rules 7, 17, 18); who plays whom: desk.py."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from desk import LR, TOKENS, Desk, Twins, Weights

from pyddl.config import load_config
from pyddl.core.layout import build_layout
from pyddl.errors import ConfigError, ProtocolError, TransportError
from pyddl.link.mailbox import CLOSING, DRAINING, FINISHED, LEFT, MERGED, TRAINING, pack
from pyddl.run.learner import Learner
from pyddl.run.replica import Replica, tensor_specs
from pyddl.store.trace import Trace

# ---------------------------------------------------------------- the loop and the end


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "10"])
def test_learner_step_with_tokens_that_are_no_count_is_refused(tokens: Any):
    desk = Desk()
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        desk.learner.step(tokens=tokens)
    assert desk.learner.num_steps == 0


def test_learner_step_accepts_numpy_integers_and_any_loss():
    desk = Desk()
    desk.learner.step(tokens=np.int32(7))
    desk.learner.step(tokens=7, loss=torch.tensor(2.5, requires_grad=True))
    desk.learner.step(tokens=7, loss=3.0)
    desk.box.turns(20)
    reading = desk.box.port.read()
    assert reading is not None
    assert (reading.tokens, reading.loss) == (21, 2.5), "the loss is read one step later"


def test_learner_runs_until_the_stop_step_or_the_end_of_the_running_phase():
    desk = Desk()
    desk.box.beat(stop_step=4)
    running = []
    for _ in range(4):
        desk.train()
        running.append(desk.learner.running)
    assert running == [True, True, True, False]
    desk = Desk()
    desk.train()
    assert desk.learner.running
    desk.box.beat(phase=DRAINING)
    desk.train()
    assert not desk.learner.running


def test_learner_progress_is_the_boards_tokens_or_the_clock_whichever_is_further():
    desk = Desk("run.max_tokens=1000", "run.max_steps=50")
    assert desk.learner.progress == 0
    desk.train(5)
    assert desk.learner.progress == 0.1, "5 of 50 steps"
    desk.box.beat(tokens=400)
    desk.train()
    assert desk.learner.progress == 0.4
    desk.box.beat(tokens=5000)
    desk.train()
    assert desk.learner.progress == 1.0


def test_learner_progress_right_after_a_resume_is_that_of_the_run():
    """At 0 a schedule would begin with its peak learning rate, until the board is read."""
    desk = Desk("run.max_tokens=1000")
    desk.learner._link.tokens = 400  # what the welcome says
    assert desk.learner._board is None
    assert desk.learner.progress == 0.4
    desk.box.beat(tokens=399)
    desk.train()
    assert desk.learner._board.tokens == 399
    assert desk.learner.progress == 0.4, "it does not fall"
    desk.box.beat(tokens=500)
    desk.train()
    assert desk.learner.progress == 0.5


def test_learner_close_declines_what_it_has_nothing_for_answers_the_drain_and_takes_the_last_version():
    desk = Desk("timeouts.drain_s=5", fragments=2)
    desk.train(3)
    desk.publish(1, 2.0, fragment=1)
    desk.train(1)
    desk.publish(2, 2.5, fragment=1)
    desk.box.beat(phase=DRAINING)
    heard: dict[int, bool] = {}
    complete: dict[int, float] = {}
    states: list[int] = []
    rounds = {desk.ask(0, base=0, line=0): 0, desk.ask(1, base=2, line=1): 1}

    def act() -> None:
        reading = desk.box.port.read()
        if reading is not None:
            states.append(reading.state)
            heard.update({r: declined for _, r, declined in reading.answers})
            for line, r in reading.commits:
                complete[r] = float(desk.box.port.verify(line, r).floats[0])
                desk.box.port.resolve(line, r, MERGED)
                desk.box.publish(0, 1, np.array([5.0], dtype=np.float32), step=4, contains=r)
        desk.box.pump()
        if len(heard) == 2 and complete and desk.box.port.downlink.idle:
            desk.box.beat(phase=FINISHED)

    desk.box.couriers[0].start()  # from here on the link thread has its own turns
    closing = threading.Thread(target=desk.learner.close, daemon=True)
    closing.start()
    deadline = time.monotonic() + 10
    while closing.is_alive():
        assert time.monotonic() < deadline, "close() must come to its end"
        act()
        time.sleep(0.001)
    first, second = rounds
    assert heard == {first: False, second: True}, "no progress since version 2 of fragment 1"
    assert complete == {first: 4 * LR}
    assert desk.weights == [5.0, 2.5]
    assert (desk.saved, desk.left) == (1, [(0, False)])
    act()
    assert states[-1] == LEFT
    assert CLOSING in states
    desk.learner.close()
    assert (desk.saved, len(desk.left)) == (1, 1), "a second close() does nothing"
    with pytest.raises(ProtocolError, match="closed"):
        desk.learner.step(tokens=1)
    assert not desk.learner.running


def test_learner_declines_only_in_close():
    desk = Desk()
    desk.publish(1, 2.0)
    desk.train()
    desk.ask(base=1)
    desk.learner._meet_boundary(0)  # a boundary without a step, as in lock-step
    assert desk.nothing()


def test_learner_close_with_a_syncer_that_never_finishes_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("pyddl.run.learner._CLOSE_SLACK_S", 0.0)
    desk = Desk("timeouts.drain_s=0.2", "timeouts.stall_s=0.1")
    desk.box.beat(phase=DRAINING)
    desk.train()
    desk.box.couriers[0].start()
    desk.learner.close()
    assert "the last rounds took more than" in caplog.text
    assert desk.left == [(0, True)], "it does not count as left in good order"


def test_learner_syncer_that_is_silent_too_long_ends_it_with_75_and_its_state_saved():
    desk = Desk("timeouts.syncer_s=0.05")
    desk.train()
    time.sleep(0.06)
    desk.train()  # once is not enough: after a pause of this process itself it looks the same
    time.sleep(0.06)
    with pytest.raises(SystemExit) as ended:
        desk.train()
    assert ended.value.code == 75
    assert (desk.saved, desk.left) == (1, [(75, True)])


def test_learner_link_thread_that_has_ended_ends_it_with_75_and_the_reason(caplog: pytest.LogCaptureFixture):
    desk = Desk()
    desk.train()
    courier = desk.box.couriers[0]
    courier.was_started = True  # and is not alive: it has ended
    courier.failure = RuntimeError("the network card is gone")
    with pytest.raises(SystemExit) as ended:
        desk.learner.step(tokens=TOKENS)
    assert ended.value.code == 75
    assert (desk.saved, desk.left) == (1, [(75, True)])
    assert "the network card is gone" in caplog.text


def test_learner_lockstep_waits_for_the_limit_and_for_what_it_pushed():
    desk = Desk("sync.lockstep_steps=10")
    desk.box.beat(limit_step=1)
    r = desk.ask()
    desk.box.turns(8)
    done = threading.Event()

    def train() -> None:
        for _ in range(2):
            desk.model.w[0].grad = torch.ones(1)
            desk.optimizer.step()
            desk.learner.step(tokens=TOKENS)
        done.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    for _ in range(100):
        desk.box.turns(1)
        time.sleep(0.001)
    assert desk.learner.num_steps == 1
    reading = desk.box.port.read()
    assert reading is not None
    assert reading.commits == ((0, r),)
    desk.box.beat(limit_step=2)  # others may go on: this one still waits for what it pushed
    for _ in range(50):
        desk.box.turns(1)
        time.sleep(0.001)
    assert desk.learner.num_steps == 1
    desk.box.port.ask(0, 0)
    desk.box.publish(0, 1, np.array([7.0], dtype=np.float32), contains=r)
    desk.box.beat(limit_step=None)
    for _ in range(3000):
        if done.is_set():
            break
        desk.box.turns(1)
        desk.box.pump()
        time.sleep(0.001)
    assert done.is_set()
    assert desk.weight == 7.0 - LR, "the receipt came before the second step"


def test_learner_alone_trains_to_its_own_end_and_closes():
    config, _ = load_config(None, ["run.max_steps=3", "sync.interval=2"])
    model = Weights(1)
    specs = tensor_specs(model)
    saved = []
    learner = Learner(
        config, model, torch.optim.SGD(model.parameters(), lr=LR), Replica(model, build_layout(specs)), None,
        learner_id=0, num_learners=1, num_ranks=1, receipts=Trace(None), save=saved.append,
    )  # fmt: skip
    seen = []
    for item in learner.shard(range(2)):
        seen.append(item)
        learner.average_gradients()
        learner.step(tokens=4)
    assert seen == [0, 1, 0], "endless, since the run has an end of its own"
    assert (learner.tokens, learner.progress) == (12, 1.0)
    learner.close()
    assert saved == [learner]


# ---------------------------------------------------------------- groups


def test_learner_group_applies_only_what_every_rank_says_it_holds():
    """Rank 0 has joined the slices, rank 1 is about to: for one boundary only rank 0 holds the version."""
    twins = Twins()
    twins.train(1)
    twins.box.publish(0, 1, np.full(32, 5, dtype=np.float32))
    couriers = twins.box.couriers
    while len(twins.box.groups[1].record) == 0:
        twins.box.turn(1)  # until its slice is in the gather
    while couriers[0].received_sequence == 0:
        twins.box.turn(0)
    assert couriers[1].received_sequence == 0
    for _ in range(3):
        for future in [twins.pool.submit(twins.step, rank, 1) for rank in range(2)]:
            future.result(20)
    assert twins.values() == [1 - 4 * LR / 2] * 2
    twins.train(3)
    assert twins.values()[0] == twins.values()[1] > 3


@pytest.mark.parametrize("receipt", ["replace", "rebase"])
def test_learner_group_answers_one_boundary_late_together_with_common_tokens(receipt: str):
    twins = Twins(f"sync.receipt={receipt}")
    twins.train(2)
    assert twins.values() == [1 - 2 * LR / 2] * 2
    twins.box.port.ask(0, pack(1, 0, 0))
    twins.train(1)  # rank 0 posts what it has read
    reading = twins.box.port.read()
    assert reading is not None
    assert reading.answers == ()
    twins.train(1)  # carried out: the snapshot of step 4
    twins.train(1)  # the tokens of step 4 are known: the payload goes
    twins.box.until(lambda: (r := twins.box.port.read()) is not None and bool(r.commits), "the contribution")
    contribution = twins.box.port.verify(0, 1)
    h = contribution.header
    assert (h.c_steps, h.c_tokens, h.step) == (4, 4 * 21, 4)
    assert set(contribution.floats.tolist()) == {4 * LR / 2}
    twins.box.port.resolve(0, 1, MERGED)
    twins.box.publish(0, 1, np.full(32, 9, dtype=np.float32), step=11, contains=1)
    twins.train(4)
    # replace: the version counts from the boundary at which both hold it; rebase: nothing is lost but the 4 pushed
    lost = 4 if receipt == "rebase" else twins.learners[0]._exchange.fragments[0].since_step
    assert twins.values() == [9 - (9 - lost) * LR / 2] * 2
    assert twins.learners[0].step_count == twins.learners[1].step_count > 11
    twins.box.port.ask(0, 0)
    twins.box.port.ask(1, pack(2, 0, 1))
    twins.train(4)
    twins.box.until(lambda: (r := twins.box.port.read()) is not None and bool(r.commits), "the second contribution")
    contribution = twins.box.port.verify(1, 2)
    c_steps = contribution.header.c_steps
    assert contribution.header.c_tokens == 21 * c_steps
    assert set(contribution.floats.tolist()) == {c_steps * LR / 2}
    assert twins.groups[0].record == twins.groups[1].record, "the same collectives in the same order"


def test_learner_group_applies_nothing_that_one_rank_does_not_hold():
    twins = Twins()
    twins.box.publish(0, 1, np.full(32, 5, dtype=np.float32))
    # rank 1's link is slow: both need both slices, so rank 0 cannot have it alone either
    twins.box.windows[1].stuck = {"get"}
    twins.train(3)
    assert twins.values() == [1 - 3 * LR / 2] * 2
    twins.box.windows[1].stuck = set()
    twins.train(4)
    assert twins.values()[0] == twins.values()[1] > 3


def test_learner_group_lockstep_wait_that_takes_too_long_ends_on_all_ranks_together(caplog: pytest.LogCaptureFixture):
    """One rank that left the wait alone would meet the other's small sum with its gradients."""
    twins = Twins("sync.lockstep_steps=100", "timeouts.heartbeat_s=0.15")
    twins.box.beat(limit_step=1)
    twins.box.turns(8)
    release = threading.Event()
    group_wait = twins.groups[1].wait

    def slower(request: Any, what: str) -> None:
        if not release.is_set():
            time.sleep(0.01)
        group_wait(request, what)

    twins.groups[1].wait = slower  # type: ignore[method-assign]
    for _ in range(6):
        twins.train(1)
    assert twins.groups[0].record[: len(twins.groups[1].record)] == twins.groups[1].record
    assert [learner.num_steps for learner in twins.learners] == [6, 6]
    assert twins.left == []


def test_learner_rank_whose_mate_is_gone_ends_with_status_1(caplog: pytest.LogCaptureFixture):
    twins = Twins()
    twins.train(1)

    def fail(request: Any, what: str) -> None:
        raise TransportError(f"nobody came for {what}")

    twins.groups[0].wait = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        twins.learners[0].step(tokens=1)
    assert ended.value.code == 1
    assert twins.left == [(0, 1, True)]
    assert "nobody came" in caplog.text


def test_learner_state_word_says_training_until_close():
    desk = Desk()
    desk.train()
    reading = desk.box.port.read()
    assert reading is not None
    assert reading.state == TRAINING
    assert not math.isnan(desk.weight)
