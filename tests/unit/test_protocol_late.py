"""What comes late, twice, or from another life of a learner: the machine's own promises (ours)."""

from __future__ import annotations

from rig import Rig

from pyddl.core.events import (
    Announced,
    CloseRound,
    ContributionDamaged,
    LearnerDone,
    LearnerJoined,
    LearnerLost,
    LearnerSilent,
    Merge,
    OpenRound,
    Progress,
    Publish,
    Reject,
)

# ----------------------------------------------------------------------------------------------------- incarnations


def test_events_of_another_incarnation_are_ignored_and_counted() -> None:
    rig = Rig()
    rig.join(0, incarnation=5)
    for event in (
        LearnerJoined(0, 5),
        LearnerJoined(0, 4),
        Progress(0, 4, 99, 99, 990),
        Announced(0, 6, 1),
        LearnerLost(0, 4),
        LearnerDone(0, 4),
        LearnerSilent(7, 1),
    ):
        assert rig.give(event) == ()
    assert sum(rig.protocol.ignored.values()) == 7
    assert rig.protocol.ignored["LearnerJoined"] == 2
    assert rig.protocol.learners[0].is_live


def test_lost_is_final_for_an_incarnation_and_silence_is_not() -> None:
    rig = Rig(learners=2)
    rig.join(0, 1)
    rig.give(LearnerSilent(0, 1))
    assert not rig.protocol.learners[0].is_live
    rig.walk(0, 1)
    assert rig.protocol.learners[0].is_live
    rig.give(LearnerLost(0, 1))
    rig.give(Progress(0, 1, 2, 2, 20))
    assert rig.protocol.learners[0].state == "lost"
    rig.join(0, incarnation=2)
    assert rig.protocol.learners[0].is_live


def test_contribution_of_a_dead_incarnation_is_merged_but_not_named_as_its_successors() -> None:
    rig = Rig(learners=2)
    rig.join(0, 1)
    rig.march(8)
    rig.announce(0)
    rig.arrive(0)
    rig.give(LearnerLost(0, 1))
    rig.join(0, incarnation=2)
    rig.announce(0)
    assert rig.last(Reject).reason == "an earlier incarnation's contribution is in this round"
    rig.announce(1)
    rig.arrive(1)
    assert [(c.learner_id, c.incarnation) for c in rig.last(Merge).contributors] == [(0, 1), (1, 1)]
    rig.finish_merge()
    assert rig.last(Publish).merged == (1,)
    assert rig.protocol.tokens().effective == 20
    assert rig.protocol.learners[0].tokens.effective == 0


def test_successor_may_answer_a_round_that_its_forerunner_only_announced() -> None:
    rig = Rig(learners=2)
    rig.join(0, 1)
    rig.march(8)
    rig.announce(0)
    rig.join(0, incarnation=2)  # the loss was not even seen
    rig.announce(0)
    rig.announce(1)
    rig.arrive(0)
    rig.arrive(1)
    assert [(c.learner_id, c.incarnation) for c in rig.last(Merge).contributors] == [(0, 2), (1, 1)]


# ---------------------------------------------------------------------------------------------- late and repeated


def two_of_three_announced() -> Rig:
    """Round 1 is collecting: closed with learners 0 and 1, without 2."""
    rig = Rig(learners=3)
    rig.join(0, 1, 2)
    rig.march(8)
    rig.announce(0)
    rig.announce(1)
    rig.tick(10.0)
    assert rig.all(CloseRound)
    return rig


def test_late_announcement_is_refused_once_and_its_payload_is_not_merged() -> None:
    rig = two_of_three_announced()
    rig.announce(2)
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (2, "late")
    rig.arrive(2)
    rig.arrive(0)
    rig.arrive(1)
    assert [c.learner_id for c in rig.last(Merge).contributors] == [0, 1]
    assert len(rig.all(Reject)) == 1
    assert rig.protocol.tokens().discarded == 10


def test_repeated_events_of_a_contribution_do_not_spoil_its_answer() -> None:
    rig = two_of_three_announced()
    rig.arrive(0)
    rig.announce(0)
    rig.arrive(0)
    rig.arrive(1)
    rig.arrive(1)
    rig.announce(1)
    rig.finish_merge()
    rig.announce(1, 1)
    assert not rig.all(Reject)
    assert rig.last(Publish).merged == (0, 1)
    assert rig.protocol.tokens().proposed == 20
    assert rig.protocol.ignored == {"ContributionArrived": 2, "Announced": 3}


def test_payload_seen_before_its_announcement_counts_as_announced() -> None:
    rig = Rig(learners=2, quorum=2)
    rig.join(0, 1)
    rig.march(8)
    rig.arrive(0)
    rig.announce(0)
    rig.arrive(1)
    assert len(rig.last(Merge).contributors) == 2
    rig.announce(1)
    assert not rig.all(Reject)


def test_damaged_payload_is_refused_and_the_rest_is_merged() -> None:
    rig = two_of_three_announced()
    rig.give(ContributionDamaged(0, 1, 1, "wrong checksum"))
    rig.arrive(1)
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (0, "damaged")
    assert [c.learner_id for c in rig.last(Merge).contributors] == [1]


def test_learner_that_falls_silent_with_its_payload_under_way_is_no_longer_waited_for_and_told_so() -> None:
    rig = two_of_three_announced()
    rig.arrive(0)
    rig.give(LearnerSilent(1, 1))
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (1, "late")
    assert [c.learner_id for c in rig.last(Merge).contributors] == [0]


def test_round_of_which_nothing_came_is_opened_anew_at_once() -> None:
    rig = Rig()
    rig.join(0)
    rig.march(8)
    rig.announce(0)
    rig.tick(1000.0)
    assert rig.last(Reject).cause == "late"
    assert rig.last(OpenRound) == OpenRound(2, 0, 0, False, "due at 8")
