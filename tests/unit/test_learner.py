"""What a learner does at a step boundary, as a function of the board and of what has arrived (rules 2, 4, 5, 7, 12).

A real Learner with its real courier and the syncer's real port over local memory; the syncer is played by the test. The
model is one weight with a constant gradient of 1 under SGD with learning rate 0.5, so every step takes 0.5 off it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from desk import LR, TOKENS, Desk, content

from pyddl.core.kernels import decode_bf16, encode_bf16
from pyddl.link.mailbox import MERGED, NOT_MERGED
from pyddl.store.trace import read_trace

# ---------------------------------------------------------------- pull


def test_learner_round_is_answered_at_the_next_boundary_with_what_was_learnt_since_the_receipt():
    desk = Desk()
    desk.train(4)
    r = desk.ask()
    desk.train()
    assert content(desk.contribution(r)) == (5 * LR, 0, 5, 5, 5 * TOKENS)
    assert desk.weight == 8 - 5 * LR, "a push changes nothing at the learner"


def test_learner_round_is_answered_once_per_base_until_the_outcome():
    """Rule 4. Pushing again before the receipt would count the same progress twice."""
    desk = Desk()
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.train(3)
    assert desk.nothing(), "the same round again"
    desk.ask(line=1)
    desk.train(3)
    assert desk.nothing(), "another round from the same base"


def test_learner_refused_contribution_frees_its_base_for_another_round():
    desk = Desk()
    r = desk.ask()
    desk.train(2)
    assert content(desk.contribution(r))[3] == 1
    desk.box.port.ask(0, 0)
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train(2)
    assert desk.nothing()
    r = desk.ask(line=1)
    desk.train()
    assert content(desk.contribution(r)) == (5 * LR, 0, 5, 5, 5 * TOKENS), "all the progress since the base"


def test_learner_refused_round_that_is_still_asked_is_not_answered_again():
    """A damaged payload: the round goes on with the others. Another upload could not be told from the first."""
    desk = Desk()
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train(1)
    puts = len(desk.box.windows[0].calls("put"))
    desk.train(5)
    assert desk.nothing()
    assert len(desk.box.windows[0].calls("put")) == puts, "nothing is sent, encoded and thrown away each step"


def test_learner_merged_contribution_waits_for_its_receipt_before_it_answers_again():
    desk = Desk()
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.box.port.resolve(0, r, MERGED)
    desk.ask(line=1)
    desk.train(3)
    assert desk.nothing(), "merged but not yet received: the base is used up"


def test_learner_round_for_a_version_it_does_not_hold_is_not_answered():
    """Rule 2: not for a fragment of which a newer version is on its way."""
    desk = Desk()
    desk.ask(base=1)
    desk.train(3)
    assert desk.nothing()
    desk.publish(1, 4.0)
    desk.train()  # the receipt: no progress yet
    assert desk.nothing()
    desk.train()
    answers, _ = desk.look()
    assert list(answers) == [1]


def test_learner_base_version_is_compared_in_its_low_16_bits():
    desk = Desk()
    desk.publish(0x1_0003, 8.0)
    desk.train()
    r = desk.ask(base=0x1_0003)
    desk.train()
    assert content(desk.contribution(r))[1] == 0x1_0003


def test_learner_line_that_holds_a_push_is_not_written_again():
    """A slot is never rewritten before its outcome, although the line asks for another fragment."""
    desk = Desk(fragments=2)
    r = desk.ask(fragment=0)
    desk.train()
    desk.contribution(r)
    late = desk.ask(fragment=1)  # the line was freed when the round closed; its outcome is not out yet
    desk.train(2)
    assert desk.nothing()
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train()
    assert content(desk.contribution(late))[3:] == (4, 4 * TOKENS)


def test_learner_late_outcome_of_an_older_round_changes_nothing():
    desk = Desk()
    desk.box.port.resolve(0, 77, NOT_MERGED)
    desk.next_round = 78
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.ask(line=1)
    desk.train(2)
    assert desk.nothing(), "still pending"


def test_learner_two_rounds_of_different_fragments_are_answered_at_one_boundary():
    desk = Desk(fragments=2)
    r0, r1 = desk.ask(0, line=0), desk.ask(1, line=1)
    desk.train()
    answers, complete = desk.look()
    assert answers == {r0: False, r1: False}
    assert set(complete) == {r0, r1}


# ---------------------------------------------------------------- receipts


def test_learner_replace_takes_theta_and_its_counters_start_at_zero():
    desk = Desk()
    r = desk.ask()
    desk.train(1)
    desk.contribution(r)
    desk.train(3)
    desk.publish(1, -2.0, step=0, contains=r)
    desk.train(2)
    # the version is taken at the boundary after the first of these two steps
    assert desk.weight == -2.0 - LR
    r = desk.ask(base=1)
    desk.train()
    assert content(desk.contribution(r)) == (2 * LR, 1, 7, 2, 2 * TOKENS)


def test_learner_replace_receipt_without_the_pending_push_keeps_the_push_pending():
    desk = Desk(slots=3)
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.publish(1, -2.0)  # of others: does not contain round r
    desk.train(2)
    assert desk.weight == -2.0 - LR
    late = desk.ask(base=1, line=1)
    desk.train(2)
    assert desk.nothing(), "its push is still under way"
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train()
    assert content(desk.contribution(late))[:2] == (4 * LR, 1)


def test_learner_rebase_receipt_that_contains_the_push_keeps_what_was_learnt_since():
    """theta = 8 - 2*LR pushed, 3 steps more; Theta = 7 arrives: theta <- 7 - 3*LR - (the step of that boundary)."""
    desk = Desk("sync.receipt=rebase")
    desk.train(1)
    r = desk.ask()
    desk.train(1)
    assert content(desk.contribution(r)) == (2 * LR, 0, 2, 2, 2 * TOKENS)
    desk.train(3)
    desk.publish(1, 7.0, contains=r)
    desk.train(1)
    assert desk.weight == 7.0 - 4 * LR
    r = desk.ask(base=1)
    desk.train(1)
    assert content(desk.contribution(r)) == (5 * LR, 1, 7, 5, 5 * TOKENS), "the counters are those since the push"


def test_learner_rebase_receipt_that_does_not_contain_the_push_keeps_everything():
    """Version 1 of others arrives while round r is pending; then version 2, which contains r."""
    desk = Desk("sync.receipt=rebase", slots=3)
    r = desk.ask()
    desk.train(2)
    assert content(desk.contribution(r))[3:] == (1, TOKENS)
    desk.train(1)
    desk.publish(1, 6.0)  # moved by -2 from the old anchor 8
    desk.train(1)
    assert desk.weight == 8 - 4 * LR - 2
    desk.publish(2, 5.5, contains=r)  # -2 of the others, -LR of this learner
    desk.train(1)
    # since the push: 4 steps; pushed was 8 - LR, seen from version 1 it is 6 - LR
    assert desk.weight == 5.5 - 4 * LR
    r = desk.ask(base=2)
    desk.train(1)
    assert content(desk.contribution(r)) == (5 * LR, 2, 6, 5, 5 * TOKENS)


def test_learner_rebase_refused_push_is_pushed_again_whole_from_the_new_anchor():
    desk = Desk("sync.receipt=rebase", slots=3)
    r = desk.ask()
    desk.train(2)
    desk.contribution(r)
    desk.publish(1, 6.0)
    desk.train(1)
    desk.box.port.ask(0, 0)
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train(1)
    r = desk.ask(base=1, line=1)
    desk.train(1)
    assert content(desk.contribution(r)) == (5 * LR, 1, 5, 5, 5 * TOKENS), "nothing was lost by the refusal"


@pytest.mark.parametrize("receipt", ["replace", "rebase"])
def test_learner_of_several_versions_the_newest_counts_although_an_older_contains_the_push(receipt: str):
    desk = Desk(f"sync.receipt={receipt}", slots=3)
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    desk.publish(1, 7.5, contains=r)
    desk.publish(2, 6.0)  # its header still names round r, the last that held this learner
    assert desk.box.couriers[0].received_sequence == 2
    desk.train()
    assert desk.weight == (6.0 if receipt == "replace" else 6.0 - LR)
    r = desk.ask(base=2)
    desk.train()
    assert content(desk.contribution(r))[3] == (1 if receipt == "replace" else 2)


def test_learner_clock_is_raised_to_the_syncers_at_a_receipt_and_never_falls():
    desk = Desk(step=5)
    assert desk.learner.step_count == 5
    desk.train(2)
    desk.publish(1, 1.0, step=40)
    desk.train(1)
    assert (desk.learner.step_count, desk.learner.num_steps) == (40, 3)
    desk.publish(2, 1.0, step=17)
    desk.train(2)
    assert (desk.learner.step_count, desk.learner.num_steps) == (42, 5)
    reading = desk.box.port.read()
    assert reading is not None
    assert (reading.step, reading.num_steps, reading.tokens) == (42, 5, 5 * TOKENS)


@pytest.mark.parametrize(
    ("in_flight", "backlog", "first"),
    [(2, 1, 1), (2, 2, 2), (2, 7, 2), (2, 8, 2), (2, 9, 3), (2, 24, 6), (8, 5, 5), (8, 8, 8), (8, 12, 8), (5, 24, 6)],
)
def test_learner_backlog_is_applied_in_parts_oldest_first(in_flight: int, backlog: int, first: int):
    """Rule 12: at most max(rounds in flight, backlog/4) per boundary: no long stop in one step, no lag."""
    desk = Desk(f"sync.in_flight={in_flight}", fragments=24)
    fill(desk, backlog)
    desk.train()
    applied = [p for p, w in enumerate(desk.weights) if w == 1.0]
    assert applied == list(range(first))
    desk.train(12)
    assert not desk.box.couriers[0].arrivals(10**6), "and after a while it has caught up"


@pytest.mark.parametrize(("step", "first"), [(99, 12), (100, 3)])
def test_learner_backlog_limit_follows_the_schedule_of_h(step: int, first: int):
    """With H = 4 twelve of 24 fragments are in flight, with H = 24 two; a quarter of the backlog is three."""
    desk = Desk("sync.interval=4:0,24:100", fragments=24)
    fill(desk, 12)
    desk.box.beat(step=step)
    desk.box.turns(8)
    desk.step()
    assert sum(w == 1.0 for w in desk.weights) == first


def fill(desk: Desk, backlog: int) -> None:
    """So many fragments have come, all of value 1.0."""
    for p in range(backlog):
        desk.publish(p, 1, fragment=p)
        desk.box.pump()
        desk.box.turns(20)
    for p in range(backlog):
        desk.box.published[p].floats[0] = 0
    assert desk.box.couriers[0].received_sequence == backlog


def test_learner_receipts_are_written_to_the_tape(tmp_path: Path):
    desk = Desk(receipts=tmp_path / "receipts.jsonl")
    r = desk.ask()
    desk.train(2)
    desk.contribution(r)
    desk.publish(1, 3.0, step=30, contains=r)
    desk.train()
    lines = [line for line in read_trace(tmp_path / "receipts.jsonl") if line["kind"] == "Received"]
    (line,) = lines
    wanted = {"fragment": 0, "version": 1, "num_steps": 3, "contains_round": r, "cursor": []}
    assert {k: line[k] for k in wanted} == wanted


# ---------------------------------------------------------------- error feedback


def bf16(value: float) -> float:
    bits = np.empty(1, dtype=np.uint16)
    encode_bf16(np.array([value], dtype=np.float32), None, bits)
    out = np.empty(1, dtype=np.float32)
    decode_bf16(bits, out)
    return float(out[0])


def pushed_1_001() -> tuple[Desk, int, float]:
    """A bf16 learner whose first push of 1.001 was rounded to 1.0; what was rounded off; the step is 1.001."""
    desk = Desk("sync.wire=bf16", "sync.receipt=rebase", slots=3)
    desk.optimizer.param_groups[0]["lr"] = 1.001
    r = desk.ask()
    desk.train()
    delta = float(np.float32(8) - np.float32(desk.weight))
    sent = content(desk.contribution(r))[0]
    assert sent == bf16(delta) == 1.0
    return desk, r, delta - sent


def test_learner_rounded_off_part_of_a_merged_push_goes_with_the_next():
    desk, r, rest = pushed_1_001()
    desk.publish(1, 8.0, contains=r)
    desk.optimizer.param_groups[0]["lr"] = 0.0
    desk.train()
    for w in desk.model.w:
        w.data -= 0.00390625  # 2^-8: exact in bf16 by itself
    r = desk.ask(base=1)
    desk.train()
    # 1 step of lr 0 is progress by count; the difference is 2^-8 and what was rounded off before
    delta = float(np.float32(8) - np.float32(desk.weight))
    assert content(desk.contribution(r))[0] == pytest.approx(bf16(delta + rest), abs=0)
    assert bf16(delta + rest) != bf16(delta), "else this shows nothing"


def test_learner_rounded_off_part_of_a_refused_push_is_forgotten():
    """Rule 5: the residual from before the push is restored; the whole difference is pushed again anyway."""
    desk, r, _rest = pushed_1_001()
    desk.box.port.ask(0, 0)
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.optimizer.param_groups[0]["lr"] = 0.0
    desk.train()
    for w in desk.model.w:
        w.data[:] = 8 - 0.00390625
    r = desk.ask(base=0, line=1)
    desk.train()
    assert content(desk.contribution(r))[0] == 0.00390625


def test_learner_residual_survives_a_receipt_that_does_not_contain_the_push():
    desk, r, rest = pushed_1_001()
    desk.publish(1, 8.0, contains=r)
    desk.optimizer.param_groups[0]["lr"] = 0.0
    desk.train()
    desk.publish(2, 4.0)
    desk.train()
    anchor = 4.0
    for w in desk.model.w:
        w.data[:] = anchor - 0.00390625
    r = desk.ask(base=2, line=1)
    desk.train()
    assert content(desk.contribution(r))[0] == bf16(0.00390625 + rest)
