"""Rules 1 to 8 of the protocol: each test runs the same world with the rule and with the rule switched off.

A rule whose absence makes no difference is not a rule; the figures without it are asserted too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from rig import Rig
from scenario import Scenario, Script, every

from pyddl.core.events import CloseRound, LearnerSilent, Merge, OpenRound, Progress, Publish, Reject
from pyddl.core.ledger import LearnerRecord
from pyddl.core.protocol import Protocol, ProtocolConfig
from pyddl.core.rounds import Round


def jitter(seed: int, width: float) -> Callable[[int], float]:
    """Step times around 1 s, the same for the same seed."""
    rng = random.Random(seed)
    times = [rng.uniform(1 - width, 1 + width) for _ in range(2000)]
    return lambda step: times[step]


# ----------------------------------------------------------------------------------------------------- rule 1: clock


class NoMinimumGap(Protocol):
    def _min_gap(self, interval: int) -> int:
        return 1


def reopened_after_stall(protocol: type[Protocol]) -> int:
    """Clock steps from a round that a stall had delayed by 23 of its 24 steps to the fragment's next round."""
    rig = Rig(interval=24, protocol=protocol)
    rig.join(0)
    rig.walk(0, 23)
    rig.walk(0, 47)
    rig.announce(0)
    rig.arrive(0)
    rig.finish_merge()
    for step in range(48, 80):
        rig.walk(0, step)
        if len(rig.all(OpenRound)) == 2:
            return step - 47
    raise AssertionError("not reopened at all")


def test_clock_after_stall_does_not_reopen_before_half_an_interval() -> None:
    assert reopened_after_stall(Protocol) == 25
    assert reopened_after_stall(NoMinimumGap) == 1  # two rounds within two steps: over-driven


def test_clock_jump_makes_every_fragment_due_once() -> None:
    rig = Rig(fragments=4, interval=8, in_flight=4)
    rig.join(0)
    rig.walk(0, 7)
    assert not rig.all(OpenRound)
    rig.walk(0, 15)  # over 8, 10, 12 and 14
    assert [a.fragment for a in rig.all(OpenRound)] == [0, 1, 2, 3]
    for r in list(rig.all(OpenRound)):
        rig.announce(0, r.round)
        rig.arrive(0, r.round)
        rig.finish_merge(r.round)
    rig.walk(0, 31)  # over two intervals more: still once
    assert sorted(Counter(a.fragment for a in rig.all(OpenRound)).values()) == [2, 2, 2, 2]


def test_clock_is_the_step_that_quorum_learners_have_reached_and_never_falls() -> None:
    rig = Rig(learners=3, quorum=2, interval=100)
    rig.join(0, 1, 2)
    rig.walk(0, 50)
    assert rig.protocol.step == 0
    rig.walk(1, 20)
    assert rig.protocol.step == 20
    rig.walk(2, 30)
    assert rig.protocol.step == 30
    rig.protocol.learners[2].silent_since_s = 0.0  # the second fastest is at 20 now
    rig.tick()
    assert rig.protocol.step == 30


def test_clock_with_two_rounds_open_queues_the_others_first_due_first() -> None:
    rig = Rig(fragments=4, interval=8)
    rig.join(0)
    rig.walk(0, 15)
    assert [a.fragment for a in rig.all(OpenRound)] == [0, 1]
    for expected in (2, 3):
        r = rig.all(OpenRound)[expected - 2].round
        rig.announce(0, r)
        rig.arrive(0, r)
        rig.finish_merge(r)
        assert rig.last(OpenRound).fragment == expected


# ------------------------------------------------------------------------------------------------------ rule 2: pull


class CountsArrivals(Protocol):
    """The quorum is met by payloads, and what has not come by then is not waited for."""

    def quorum_count(self, r: Round) -> int:
        return sum(self.learners[m].can_answer for m in r.arrived)

    def _payload_deadline(self, r: Round, learner_id: int) -> float:
        return -1.0


def shares(protocol: type[Protocol], link_s: float, width: float) -> list[float]:
    """Participation of four learners of equal pace."""
    scripts = [Script(step_s=jitter(m, width), link_s=link_s, joins_s=0.2 * m) for m in range(4)]
    config = ProtocolConfig(8, 4, interval=every(8), in_flight=8)
    world = Scenario(config, scripts, protocol=protocol).run(200)
    return [world.participation(m) for m in range(4)]


@pytest.mark.parametrize("link_s", [1.0, 5.0])
def test_quorum_of_announcements_lets_equal_learners_take_part_equally(link_s: float) -> None:
    assert min(shares(Protocol, link_s, 0.05)) > 0.97
    uneven = sorted(shares(CountsArrivals, link_s, 0.05))  # about .06, .08, .3, .5
    assert uneven[0] < 0.15
    assert uneven[-1] > 0.35


@pytest.mark.parametrize("link_s", [1.0, 5.0])
def test_quorum_of_arrivals_would_let_one_learner_take_all(link_s: float) -> None:
    assert shares(Protocol, link_s, 0.0) == [1.0] * 4
    assert sorted(shares(CountsArrivals, link_s, 0.0)) == pytest.approx([0, 0, 0, 1], abs=0.05)


def test_transfer_beyond_three_times_the_average_is_late_and_the_others_are_merged() -> None:
    rig = Rig(learners=2, interval=8)
    rig.join(0, 1)
    rig.march(8)
    rig.announce(0)
    rig.announce(1)
    rig.arrive(0)
    rig.now += 2.0
    rig.arrive(1)
    rig.finish_merge()
    rig.march(16)
    rig.announce(0)
    rig.announce(1)
    rig.arrive(0)
    assert rig.protocol.next_deadline() == rig.now + 3 * 2.0
    rig.tick(5.9)
    assert not rig.all(Reject)
    rig.tick(0.2)
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (1, "late")
    assert [c.learner_id for c in rig.last(Merge).contributors] == [0]


def test_transfer_that_became_slow_is_late_only_until_its_average_has_followed() -> None:
    slow = Script(link_s=lambda now: 0.1 if now < 60 else 3.0)
    world = Scenario(ProtocolConfig(4, 2, interval=every(8), in_flight=4), [Script(), slow]).run(300)
    late = [now for now, a in world.actions(Reject)]
    assert late
    assert max(late) < 110
    assert world.participation(1) > 0.85


def test_transfer_that_never_ends_raises_the_patience_up_to_a_bound() -> None:
    rig = Rig()
    rig.join(0)
    rig.march(8)
    rig.announce(0)
    rig.now += 1.0
    rig.arrive(0)
    rig.finish_merge()
    patience_s = []
    for step in range(9, 24):
        rig.march(8 + step)
        rig.announce(0)
        deadline = rig.protocol.next_deadline()
        assert deadline is not None
        patience_s.append(round(deadline - rig.now))
        rig.tick(deadline - rig.now)
        assert rig.last(Reject).cause == "late"
    assert patience_s[:4] == [3, 6, 12, 24]
    assert max(patience_s) <= 3 * 120


def test_transfer_measured_as_nothing_is_still_given_the_time_of_a_poll() -> None:
    rig = Rig(interval=8)
    rig.join(0)
    rig.walk(0, 8)
    rig.announce(0)
    rig.arrive(0)  # in the same poll: 0 s
    rig.finish_merge()
    rig.walk(0, 16)
    rig.announce(0)
    rig.tick(0.05)
    rig.arrive(0)
    assert rig.last(Merge).round == 2


# ----------------------------------------------------------------------------------------------------- rule 3: grace


class StepOfTheSlowest(Protocol):
    def xi_step_s(self) -> float | None:
        times = [m.step_s for m in self.learners.values() if m.is_live and m.step_s is not None]
        return max(times) if times else None


class NobodyIsWaitedFor(Protocol):
    def must_wait_for(self, m: LearnerRecord, fragment: int) -> bool:
        return False


class NoFloor(Protocol):
    def grace_floor_s(self, xi_step: float) -> float:
        return 0.0


class NoClip(Protocol):
    def _step_clip(self) -> float:
        return float("inf")

    def _clip_s(self) -> float | None:
        return None


def test_grace_with_a_learner_100_times_slower_keeps_the_interval() -> None:
    def achieved(protocol: type[Protocol]) -> float:
        scripts = [Script(), Script(), Script(), Script(step_s=100.0)]
        world = Scenario(ProtocolConfig(24, 4), scripts, protocol=protocol, poll_s=0.2).run(1500)
        return world.protocol.achieved_interval_steps() or 0.0

    assert achieved(Protocol) == pytest.approx(24, abs=0.5)
    assert achieved(StepOfTheSlowest) > 200


def test_grace_waits_now_and_then_for_a_learner_in_resonance() -> None:
    """A learner exactly 3 times slower is never at a boundary when one third of the fragments are asked for."""

    def merged(protocol: type[Protocol]) -> list[int]:
        world = Scenario(ProtocolConfig(24, 2), [Script(), Script(step_s=3.0)], protocol=protocol).run(600)
        assert world.protocol.achieved_interval_steps() == pytest.approx(24, abs=0.2)
        return [world.took_part[1, p] for p in range(24)]

    assert min(merged(Protocol)) >= 4
    assert merged(NobodyIsWaitedFor).count(0) == 8


def test_grace_is_never_shorter_than_a_step() -> None:
    def share(protocol: type[Protocol]) -> float:
        scripts = [Script(joins_s=0.2 * m, link_s=2.0) for m in range(4)]
        world = Scenario(ProtocolConfig(24, 4), scripts, protocol=protocol).run(150)
        return min(world.participation(m) for m in range(4))

    assert share(Protocol) == 1.0
    assert share(NoFloor) < 0.5  # the transfers eat up the slack of eq. 3


def test_grace_after_one_step_of_a_minute_is_hardly_longer() -> None:
    def window_s(protocol: type[Protocol]) -> float:
        rig = Rig(interval=1000, protocol=protocol)
        rig.join(0)
        for step in range(1, 20):
            rig.walk(0, step)
        assert rig.protocol.grace_window_s() == pytest.approx(0.9 * 2)
        rig.walk(0, 20, step_s=60.0)
        return rig.protocol.grace_window_s()

    assert window_s(Protocol) == pytest.approx(0.9 * 2 * 1.5)
    assert window_s(NoClip) == pytest.approx(0.9 * 2 * 30.5)


def test_grace_after_one_quorum_of_a_minute_is_not_shut() -> None:
    def slack_s(protocol: type[Protocol]) -> float:
        rig = Rig(learners=2, interval=8, protocol=protocol)
        rig.join(0, 1)
        for step in range(1, 9):
            rig.walk(0, step)
        rig.now += 60.0
        rig.announce(0)
        return 2.0 - (rig.protocol.xi_quorum_s or 0.0)

    assert slack_s(Protocol) == 0.0
    assert slack_s(NoClip) == -58.0


def test_grace_ends_when_every_live_learner_has_answered() -> None:
    rig = Rig(learners=3, interval=8)
    rig.join(0, 1, 2)
    rig.march(8)
    rig.protocol.learners[2].silent_since_s = 0.0
    rig.announce(0)
    assert not rig.all(CloseRound)
    rig.announce(1)
    assert rig.last(CloseRound).reason == "all live learners have answered"


# --------------------------------------------------------------------------------------------- rule 4: once per base


class TwicePerBase(Protocol):
    def _is_duplicate(self, m: LearnerRecord, e: object) -> bool:
        return False


def test_contribution_pushed_again_before_the_receipt_is_not_counted_twice() -> None:
    def moved(protocol: type[Protocol]) -> tuple[float, int]:
        config = ProtocolConfig(1, 1, interval=every(8), max_steps=24)
        world = Scenario(config, [Script(down_s=10.5, pushes_again=True)], protocol=protocol).run(100)
        assert world.learners[0].made["steps"] == 24
        return world.theta[0], world.protocol.rejected["duplicate base"]

    assert moved(TwicePerBase) == (30.0, 0)  # more than there was
    theta, num_rejected = moved(Protocol)
    assert theta == 10.0  # replace: what was learnt between a push and its receipt is dropped
    assert num_rejected == 4


@pytest.mark.parametrize(
    ("base_version", "kind"),
    [(4, "duplicate base"), (3, "duplicate base"), (2, "stale base"), (6, "future base")],
)
def test_contribution_from_a_base_that_is_not_its_turn_is_refused(base_version: int, kind: str) -> None:
    rig = Rig(interval=8)
    rig.join(0)
    for step in range(8, 41, 8):
        rig.walk(0, step)
        rig.announce(0)
        rig.arrive(0)
        rig.finish_merge()
    rig.walk(0, 48)
    rig.announce(0)
    rig.arrive(0, base_version=base_version)
    assert rig.last(Reject).cause == kind


def test_contribution_given_back_may_use_its_base_again() -> None:
    rig = Rig(interval=8)
    rig.join(0)
    rig.walk(0, 8)
    rig.announce(0)
    rig.arrive(0)
    rig.finish_merge(rejected=((0, "holds a NaN"),))
    assert rig.last(Reject).cause == "not finite"
    rig.announce(0)
    rig.arrive(0)
    rig.finish_merge()
    assert rig.last(Publish).version == 2  # version 1 was handed out and is not used again


# ---------------------------------------------------------------------------------------------------- rule 5: receipt


class NamesNobody(Protocol):
    """Publishes without saying whose contributions a version holds."""

    def handle(self, event, now):  # type: ignore[no-untyped-def]
        actions = super().handle(event, now)
        return tuple(replace(a, merged=()) if isinstance(a, Publish) else a for a in actions)


def test_receipt_with_rebase_counts_every_step_once() -> None:
    def theta(protocol: type[Protocol]) -> list[float]:
        script = Script(receipt="rebase", link_s=1.2, down_s=0.5)
        config = ProtocolConfig(4, 2, interval=every(8), max_steps=96)
        return Scenario(config, [script, script], protocol=protocol).run(300).theta

    assert theta(Protocol) == [96.0] * 4
    assert min(theta(NamesNobody)) > 300  # every push is counted again and again


# ---------------------------------------------------------------------------------------------- rule 6: too few


class NeverCancels(Protocol):
    def _cancel_asking(self, now: float) -> None:
        pass


def test_too_few_learners_take_back_what_was_asked_so_that_no_old_answer_wipes_hours() -> None:
    def run(protocol: type[Protocol]) -> Scenario:
        away = Script(dies_s=20.5, rejoins_s=500.0)
        config = ProtocolConfig(4, 2, quorum=2, interval=every(8))
        return Scenario(config, [Script(), away], protocol=protocol).run(520)

    world = run(Protocol)
    assert min(world.theta) > 500
    assert world.protocol.rejected["too few learners"] == 1
    world = run(NeverCancels)
    assert min(world.theta) < 40  # 480 steps of learner 0 gone, by an answer from before the loss
    assert world.protocol.rejected["too few learners"] == 0


def test_too_few_learners_cancel_and_open_anew_when_enough_are_back() -> None:
    rig = Rig(learners=2, quorum=2, interval=8)
    rig.join(0, 1)
    rig.walk(0, 8)
    rig.walk(1, 8)
    rig.announce(0)
    rig.arrive(0)
    rig.give(LearnerSilent(1, 1))
    assert rig.last(CloseRound).reason == "1 of 2 learners are live"
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (0, "too few learners")
    rig.walk(1, 9)
    assert rig.last(OpenRound).round == 2
    rig.announce(0)
    rig.announce(1)
    rig.arrive(0)
    rig.arrive(1)
    assert len(rig.last(Merge).contributors) == 2


def test_quorum_that_refusals_made_unreachable_is_asked_for_anew() -> None:
    """One of two payloads is refused before the other learner answers: nobody else would ever come."""
    damaged_once = Script(damaged=lambda fragment, now: now < 9, link_s=0.1)
    slow = Script(step_s=1.7)
    world = Scenario(ProtocolConfig(1, 2, quorum=2, interval=every(4)), [damaged_once, slow]).run(100)
    assert world.protocol.rejected["damaged"] >= 1
    assert world.merges[0] > 5


# ------------------------------------------------------------------------------------------------------- rule 7: end


class NoDrain(Protocol):
    def _begin_drain(self, now: float) -> None:
        super()._begin_drain(now)
        for fragment in self.fragments:
            fragment.drained = True


def test_drain_brings_the_last_steps_of_a_short_run_into_the_model() -> None:
    def theta(protocol: type[Protocol]) -> list[float]:
        script = Script(receipt="rebase", link_s=0.5, down_s=0.5)
        return Scenario(ProtocolConfig(24, 2, max_steps=300), [script, script], protocol=protocol).run(500).theta

    assert theta(Protocol) == [300.0] * 24
    missing = 1 - sum(theta(NoDrain)) / 24 / 300
    assert missing == pytest.approx(0.04, abs=0.005)


def test_drain_with_a_learner_that_never_answers_still_drains_every_fragment() -> None:
    asleep = Script(stops=((50.5, 1e6),))
    scripts = [Script(receipt="rebase"), asleep]
    world = Scenario(ProtocolConfig(24, 2, max_steps=60, drain_s=30.0), scripts).run(200)
    assert world.finished == "drained"
    assert all(fragment.drained for fragment in world.protocol.fragments)
    assert min(world.theta) > 55
    assert world.now < 60 + 30 - 0.5


# -------------------------------------------------------------------------------------------------- rule 8: nonsense


class Believes(Protocol):
    def _nonsense(self, m: LearnerRecord, e: Progress, now: float) -> str | None:
        return None


@pytest.mark.parametrize(
    ("step", "num_steps", "tokens", "words"),
    [
        (9, 10, 100, "may not fall"),
        (10, 9, 100, "may not fall"),
        (10, 10, 90, "may not fall"),
        (10**6, 11, 110, "may grow by the 1 inner steps"),
        (10**6, 10**6, 10**7, "more than a learner can make"),
        (11, 11, 10**9, "max_tokens_per_step"),
    ],
)
def test_progress_that_cannot_be_is_refused(step: int, num_steps: int, tokens: int, words: str) -> None:
    def clock(protocol: type[Protocol]) -> Rig:
        rig = Rig(interval=1000, protocol=protocol, max_tokens_per_step=1000)
        rig.join(0)
        rig.walk(0, 10)
        rig.give(Progress(0, 1, step, num_steps, tokens), after_s=0.1)
        return rig

    rig = clock(Protocol)
    assert words in rig.last(Reject).reason
    assert rig.protocol.step == 10
    assert rig.protocol.tokens().processed == 100
    assert rig.protocol.rejected["nonsense progress"] == 1
    believed = clock(Believes).protocol
    assert (believed.learners[0].step, believed.tokens().processed) == (step, tokens)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"c_steps": 0}, "no progress"),
        ({"c_tokens": 0}, "no progress"),
        ({"c_steps": -1, "c_tokens": -10}, "no progress"),
        ({"c_steps": 10**7}, "nonsense counters"),
        ({"c_tokens": 10**9}, "nonsense counters"),
        ({"fragment": 1}, "wrong fragment"),
        ({"base_version": 7}, "future base"),
    ],
)
def test_contribution_that_cannot_be_is_refused_counted_and_named(fields: dict[str, int], kind: str) -> None:
    rig = Rig(fragments=2, max_tokens_per_step=1000)
    rig.join(0)
    rig.walk(0, 8)
    rig.announce(0)
    rig.arrive(0, **fields)
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (0, kind)
    assert rig.protocol.rejected[kind] == 1
    assert not rig.all(Merge)


def test_contribution_read_before_the_board_that_goes_with_it_is_taken() -> None:
    rig = Rig()
    rig.join(0)
    rig.walk(0, 8)
    rig.announce(0)
    rig.arrive(0, c_steps=60, c_tokens=600)  # 52 steps of a millisecond since the board was read
    assert rig.last(Merge).contributors[0].c_steps == 60


def test_counters_of_rounds_and_versions_are_raised_before_use_and_survive_a_restart() -> None:
    rig = Rig(interval=8)
    rig.join(0)
    rig.walk(0, 8)
    rig.announce(0)
    rig.arrive(0)  # version 1 is handed out, its merge never ends
    again = Rig(interval=8)
    again.protocol.restore(rig.protocol.snapshot())
    again.join(0, incarnation=2)
    again.walk(0, 16)
    again.announce(0)
    again.arrive(0)
    assert again.last(OpenRound).round == 2
    assert again.last(Merge).version == 2
