"""The protocol against the paper, one test per claim, and the machine's own promises.

Sections are those of arXiv:2604.21428. What the tests call ours is not the paper's: it is decided in
docs/architecture.md. Transcripts lie in transcripts/ and are written anew with PYDDL_REGENERATE=1.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest
from rig import Rig
from scenario import Scenario, Script, every

from pyddl.core import events
from pyddl.core.events import (
    Announced,
    Checkpoint,
    CloseRound,
    ContributionArrived,
    ContributionDamaged,
    Contributor,
    Event,
    Finish,
    LearnerDone,
    LearnerJoined,
    LearnerLost,
    LearnerSilent,
    Merge,
    MergeDone,
    OpenRound,
    Progress,
    Publish,
    Reject,
    StopAt,
    StopRequested,
    Tick,
    event_from_dict,
    to_dict,
)
from pyddl.core.protocol import Protocol, ProtocolConfig
from pyddl.errors import ProtocolError

TRANSCRIPTS = Path(__file__).parent / "transcripts"

# --------------------------------------------------------------------------------- the paper's learner and syncer


def test_config_defaults_are_the_papers() -> None:
    """Experiments: H = 24, tau = 2, K = 1 with grace, two fragments in flight at P = 24."""
    config = ProtocolConfig(num_fragments=24, num_learners=8)
    assert (config.interval.at(0), config.tau_steps, config.quorum, config.grace) == (24, 2, 1, True)
    assert config.in_flight_at(0) == config.max_in_flight == 2


def test_syncer_takes_fragment_p_when_its_step_mod_h_is_t_p() -> None:
    """Syncer: at step t it takes the fragment p with t mod H = t_p; the t_p are spread evenly (ours)."""
    world = Scenario(ProtocolConfig(4, 1, interval=every(8)), [Script()]).run(40.5)
    opened = {int(now): a.fragment for now, a in world.actions(OpenRound) if isinstance(a, OpenRound)}
    assert opened == {8 + 2 * k: k % 4 for k in range(17)}


def test_syncer_waits_until_quorum_learners_have_answered() -> None:
    """Syncer: minimum quorum K. The round's end says why it ended (ours)."""
    rig = Rig(learners=3, quorum=2, interval=8)
    rig.join(0, 1, 2)
    rig.march(8)
    rig.announce(0)
    assert rig.protocol.next_deadline() is None  # no grace window runs before the quorum is met
    rig.tick(1000.0)
    assert not rig.all(CloseRound)
    rig.announce(1)
    rig.tick(10.0)
    assert rig.last(CloseRound).reason == "quorum and grace window, without learner 2"


@pytest.mark.parametrize(
    ("xi_step_s", "xi_quorum_s", "xi_sync_s", "window_s"),
    [
        (1.0, 0.25, 0.25, 0.9 * (2 * 1.0 - 0.5)),
        (1.0, None, None, 0.9 * 2 * 1.0),
        (2.0, 1.0, 0.5, 0.9 * (2 * 2.0 - 1.5)),
        (1.0, 5.0, 5.0, 1.1),  # never negative (paper), never shorter than 1.1 steps (ours)
    ],
)
def test_grace_window_is_gamma_times_the_slack(
    xi_step_s: float, xi_quorum_s: float | None, xi_sync_s: float | None, window_s: float
) -> None:
    """Eq. 3: xi_grace <= gamma * (tau * xi_step - (xi_quorum + xi_sync))."""
    rig = Rig()
    rig.join(0)
    rig.protocol.learners[0].step_s = xi_step_s
    rig.protocol.xi_quorum_s, rig.protocol.xi_sync_s = xi_quorum_s, xi_sync_s
    assert rig.protocol.grace_window_s() == pytest.approx(window_s)


def test_grace_window_switched_off_merges_as_soon_as_the_quorum_is_met() -> None:
    """Table on heterogeneous hardware: K = 1 without grace."""
    rig = Rig(learners=2, grace=False)
    rig.join(0, 1)
    rig.march(8)
    rig.announce(0)
    rig.arrive(0)
    assert [c.learner_id for c in rig.last(Merge).contributors] == [0]


def test_averages_are_seeded_by_the_first_sample_and_halve_the_rest() -> None:
    """Eq. 3: xi are exponential moving averages; coefficient and first value are ours."""
    rig = Rig(learners=2, quorum=2)
    rig.join(0, 1)
    for step, quorum_s, transfer_s in ((8, 0.5, 0.25), (16, 1.0, 0.75)):
        rig.march(step)
        assert step > 8 or rig.protocol.learners[0].step_s == 1.0
        rig.announce(0)
        rig.now += quorum_s
        rig.announce(1)
        rig.arrive(0)
        rig.now += transfer_s
        rig.arrive(1)
        rig.finish_merge()
        assert rig.protocol.xi_quorum_s == pytest.approx(quorum_s if step == 8 else 0.75)
        assert rig.protocol.xi_sync_s == pytest.approx(transfer_s if step == 8 else 0.5)


def test_merge_weighs_quantity_times_quality() -> None:
    """Syncer: w_m = c_tokens * (c_tokens / c_steps); contributors come sorted by learner_id (ours)."""
    rig = Rig(learners=2)
    rig.join(1, 0)
    rig.march(8)
    rig.announce(1)
    rig.announce(0)
    rig.arrive(1, c_steps=4, c_tokens=80)
    rig.arrive(0, c_steps=8, c_tokens=80)
    merge = rig.last(Merge)
    assert [(c.learner_id, c.weight) for c in merge.contributors] == [(0, 800.0), (1, 1600.0)]
    assert merge.reason == "learners 0, 1"


def test_merged_fragment_is_published_to_all_with_the_next_version() -> None:
    """Syncer: Theta_p is sent to ALL learners, also to those that gave nothing."""
    rig = Rig(learners=3)
    rig.join(0, 1, 2)
    rig.march(8)
    rig.announce(0)
    rig.arrive(0)
    rig.tick(5.0)
    publish = rig.finish_merge()[0]
    assert isinstance(publish, Publish)
    assert (publish.fragment, publish.version, publish.merged, publish.step) == (0, 1, (0,), 8)
    useless = Script(damaged=lambda fragment, now: True)
    world = Scenario(ProtocolConfig(2, 3, interval=every(8)), [Script(), Script(), useless]).run(40)
    assert world.participation(2) == 0
    assert min(world.learners[2].versions) >= 3


def test_learners_counters_start_anew_on_receipt_not_on_push() -> None:
    """Learner: c_steps and c_tokens are reset when Theta_p arrives."""
    script = Script(link_s=1.5, down_s=1.4)  # received 4 steps after the push
    world = Scenario(ProtocolConfig(1, 1, interval=every(8)), [script]).run(60)
    steps = [m.contributors[0].c_steps for m in world.merged.values()]
    assert steps == [9, 4, 5, 5, 5, 5, 5]


def test_two_fragments_may_be_in_flight_always_two_different_ones() -> None:
    """Fragments: at tau = 2 two rounds overlap."""
    world = Scenario(ProtocolConfig(4, 2, interval=every(4)), [Script(link_s=1.5)] * 2).run(100)
    most = 0
    now_open: dict[int, int] = {}
    for _, _, actions in world.tape:
        for a in actions:
            if isinstance(a, OpenRound):
                assert a.fragment not in now_open.values()
                now_open[a.round] = a.fragment
            elif isinstance(a, Publish):
                del now_open[a.round]
            most = max(most, len(now_open))
    assert most == 2


def test_restarted_learner_starts_at_the_syncers_step_with_counters_at_zero() -> None:
    """Recovery: a rejoined learner asks for the present clock; nothing of its earlier life gives it weight."""
    scripts = [Script(), Script(dies_s=30.2, rejoins_s=40.0)]
    world = Scenario(ProtocolConfig(4, 2, interval=every(8)), scripts).run(60)
    record = world.protocol.learners[1]
    assert record.incarnation == 2
    assert record.num_steps in (19, 20)  # of 50 in all
    assert record.step >= world.protocol.step - 1
    later = [c for m in world.merged.values() for c in m.contributors if c.incarnation == 2]
    assert later
    assert max(c.c_steps for c in later) <= 8


def test_killed_learner_costs_the_others_no_step() -> None:
    """Failure: availability first; the survivors train and merge on."""
    config = ProtocolConfig(4, 3, interval=every(8))
    whole = Scenario(config, [Script()] * 3).run(100)
    killed = Scenario(config, [Script(), Script(), Script(dies_s=30.2)]).run(100)
    assert [m.made["steps"] for m in killed.learners] == [100, 100, 30]
    assert killed.merges == whole.merges
    assert killed.protocol.learners[2].state == "lost"


def test_tape_given_to_another_machine_gives_the_same_actions() -> None:
    """Event tape: an asynchronous run can be replayed deterministically."""
    scripts = [Script(), Script(step_s=1.3, dies_s=20.2, rejoins_s=33.0), Script(link_s=2.5)]
    world = Scenario(ProtocolConfig(4, 3, interval=every(8), max_steps=60), scripts).run(200)
    assert world.finished == "drained"
    other = Protocol(world.config)
    for now, event, actions in world.tape:
        read = event_from_dict(json.loads(json.dumps(to_dict(event))))
        assert other.handle(read, now) == actions
    assert other.snapshot() == world.protocol.snapshot()


def test_status_and_ledger_keep_five_names_apart() -> None:
    """Ours: tokens processed, proposed, selected, effective and discarded add up."""
    scripts = [
        Script(),
        Script(poisoned=lambda p, now: now < 20),
        Script(link_s=lambda now: 0.1 if now < 20 else 9),
    ]
    world = Scenario(ProtocolConfig(4, 3, interval=every(8), max_steps=48), scripts).run(200)
    tokens = world.protocol.tokens()
    assert tokens.processed == 10 * sum(m.made["steps"] for m in world.learners)
    assert tokens.proposed == tokens.effective + tokens.discarded
    assert tokens.proposed > tokens.selected > tokens.effective > 0
    assert world.protocol.rejected["not finite"] > 0
    assert world.protocol.rejected["late"] > 0


# ------------------------------------------------------------------------------------------------- mock trajectories


@pytest.mark.parametrize("learners", [1, 2, 3])
def test_theta_of_equal_learners_is_what_they_pushed(learners: int) -> None:
    """P = 1, H = 4. Asked after steps 4, 8, ..., pushed at 5, 9, ..., received at 6, 10, ... (step 6 is dropped)."""
    world = Scenario(ProtocolConfig(1, learners, interval=every(4)), [Script()] * learners).run(24.5)
    pushed = [[c.c_steps for c in m.contributors] for m in world.merged.values()]
    assert pushed == [[steps] * learners for steps in (5, 3, 3, 3, 3)]
    assert world.theta == [5 + 4 * 3]


@pytest.mark.parametrize(("dies_s", "theta"), [(1e9, 3.0 * (5 + 4 * 3)), (10.2, 3.0 * (5 + 3) + 1.5 * 3 * 3)])
def test_theta_of_three_learners_is_their_mean_of_those_that_live(dies_s: float, theta: float) -> None:
    """Rates 1, 2 and 6: a mean of 3; without the third, a mean of 1.5."""
    scripts = [Script(), Script(rate=2.0), Script(rate=6.0, dies_s=dies_s)]
    assert Scenario(ProtocolConfig(1, 3, interval=every(4)), scripts).run(24.5).theta == [theta]


def test_theta_with_rebase_is_every_step_of_every_learner() -> None:
    config = ProtocolConfig(2, 3, interval=every(4), max_steps=20)
    scripts = [Script(receipt="rebase", rate=rate) for rate in (1.0, 2.0, 6.0)]
    assert Scenario(config, scripts).run(100).theta == [60.0, 60.0]  # 20 steps at a mean of 3 each


# --------------------------------------------------------------------------------------------------- golden transcripts

SCENARIOS = {
    "two_learners": lambda: Scenario(ProtocolConfig(2, 2, interval=every(4), max_steps=9), [Script(), Script()]),
    "loss_and_return": lambda: Scenario(
        ProtocolConfig(2, 2, interval=every(6), max_steps=20),
        [Script(), Script(joins_s=0.3, dies_s=7.4, rejoins_s=11.0)],
    ),
    "not_a_number": lambda: Scenario(
        ProtocolConfig(1, 2, interval=every(4), max_steps=12),
        [Script(), Script(joins_s=0.3, poisoned=lambda fragment, now: now < 6)],
    ),
    "silent_quorum": lambda: Scenario(
        ProtocolConfig(1, 2, quorum=2, interval=every(4), max_steps=12),
        [Script(), Script(joins_s=0.3, stops=((4.6, 12.0),))],
        heartbeat_s=3.0,
    ),
    "early_end_and_slow_link": lambda: Scenario(
        ProtocolConfig(2, 3, interval=every(4), max_steps=14),
        [
            Script(),
            Script(joins_s=0.2, ends_after_steps=6),
            Script(joins_s=0.4, link_s=lambda now: 0.1 if now < 8 else 4.0),
        ],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_transcript_of_scenario_is_the_one_on_file(name: str) -> None:
    world = SCENARIOS[name]().run(100)
    assert world.finished is not None
    file = TRANSCRIPTS / f"{name}.txt"
    if os.environ.get("PYDDL_REGENERATE") == "1":
        file.write_text(world.transcript(), encoding="utf-8")
    assert world.transcript().splitlines() == file.read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------------------------------------ events as dicts

ONE_OF_EACH: list[Event] = [
    LearnerJoined(1, 2),
    Progress(1, 2, 30, 20, 200),
    Announced(1, 2, 3, declined=True),
    ContributionArrived(1, 2, 3, 0, 4, 30, 5, 50),
    ContributionDamaged(1, 2, 3, "wrong checksum"),
    LearnerSilent(1, 2),
    LearnerLost(1, 2, "signal 9"),
    LearnerDone(1, 2),
    MergeDone(3, ((1, "holds a NaN"), (2, "holds an Inf"))),
    StopRequested("time limit"),
    Tick(),
]


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda e: type(e).__name__)
def test_event_through_json_comes_back_equal(event: Event) -> None:
    assert event_from_dict(json.loads(json.dumps(to_dict(event)))) == event


def test_events_and_handlers_are_complete() -> None:
    assert {type(e) for e in ONE_OF_EACH} == set(Event.__subclasses__()) == set(Protocol._handlers)
    named = {c.__name__ for base in (Event, events.Action) for c in [base, *base.__subclasses__()]}
    assert set(events.__all__) == named | {"Contributor", "event_from_dict", "to_dict"}


@pytest.mark.parametrize("kind", ["Merge", "Nothing", None])
def test_event_from_dict_of_no_event_is_refused(kind: str | None) -> None:
    with pytest.raises(ValueError, match="must name an event"):
        event_from_dict({"kind": kind})


def test_action_through_json_keeps_its_fields() -> None:
    merge = Merge(1, 0, 3, 4, (Contributor(0, 1, 2.5, 3, 8, 8, 80),), "learners 0")
    fields = json.loads(json.dumps(to_dict(merge)))
    assert fields["kind"] == "Merge"
    assert fields["contributors"] == [dataclasses.asdict(merge.contributors[0])]


# ------------------------------------------------------------------------------------------------------- contracts


def test_handle_of_what_is_no_event_is_refused() -> None:
    with pytest.raises(ProtocolError, match="takes an event"):
        Protocol(ProtocolConfig(1, 1)).handle("Tick", 0.0)  # type: ignore[arg-type]


def test_merge_done_of_no_merge_is_refused() -> None:
    rig = Rig()
    with pytest.raises(ProtocolError, match="must name a round that is merging"):
        rig.finish_merge(1)
    rig.join(0)
    rig.walk(0, 8)
    with pytest.raises(ProtocolError, match="must name a round that is merging"):
        rig.finish_merge()
    assert 1 in rig.protocol.rounds  # the open round is still there


def test_restore_after_the_first_event_or_of_another_layout_is_refused() -> None:
    state = Protocol(ProtocolConfig(2, 1)).snapshot()
    rig = Rig(fragments=2)
    rig.join(0)
    with pytest.raises(ProtocolError, match="before the first event"):
        rig.protocol.restore(state)
    with pytest.raises(ProtocolError, match="needs 3 fragments; got 2"):
        Protocol(ProtocolConfig(3, 1)).restore(state)


def test_restore_goes_on_with_the_same_clock_versions_and_ledger() -> None:
    config = ProtocolConfig(4, 2, interval=every(8))
    world = Scenario(config, [Script(), Script()]).run(50.07)
    state = json.loads(json.dumps(world.protocol.snapshot()))
    again = Protocol(config)
    again.restore(state)
    again.check()
    assert again.snapshot() == state
    assert again.step == world.protocol.step
    assert [f.version for f in again.fragments] == world.versions
    used = {a.round for _, a in world.actions(OpenRound) if isinstance(a, OpenRound)}
    rig = Rig(learners=2, fragments=4, interval=8)
    rig.protocol.restore(state)
    rig.join(0, 1, incarnation=2)
    rig.march(60)
    assert min(a.round for a in rig.all(OpenRound)) > max(used)
    assert {a.fragment: a.base_version for a in rig.all(OpenRound)}.items() <= dict(enumerate(world.versions)).items()


def test_running_learner_met_again_after_a_restart_does_not_seed_the_averages_with_nonsense() -> None:
    rig = Rig()
    rig.join(0)
    rig.give(Progress(0, 1, 500, 500, 5000), after_s=0.01)
    assert rig.protocol.xi_step_s() is None
    rig.give(Progress(0, 1, 501, 501, 5010), after_s=1.0)
    assert rig.protocol.xi_step_s() == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------ quorum of all


def test_quorum_of_all_with_one_lost_merges_nothing_and_names_the_missing() -> None:
    """Pitfall: a quorum that can never be met, silently."""
    scripts = [Script(), Script(), Script(dies_s=20.2)]
    world = Scenario(ProtocolConfig(2, 3, quorum=3, interval=every(8)), scripts).run(100)
    assert sum(world.merges.values()) == 3
    assert world.learners[0].made["steps"] == 100
    assert world.protocol.status() == "2 of the 3 learners of the quorum are live; missing: 2"
    assert not world.board


def test_quorum_shrinks_with_learners_that_have_finished() -> None:
    """Rule 6: LearnerDone takes a learner out of K and of the grace wait."""
    scripts = [Script(), Script(ends_after_steps=20)]
    world = Scenario(ProtocolConfig(2, 2, quorum=2, interval=every(8), max_steps=60), scripts).run(100)
    assert world.finished == "drained"
    assert world.protocol.step == 60
    assert world.protocol.status() == "finished"
    assert sum(world.merges.values()) >= 13
    assert world.protocol.rejected["too few learners"] == 0


def test_lockstep_makes_every_live_learner_the_quorum_until_its_step() -> None:
    scripts = [Script(), Script(step_s=3.0)]
    config = ProtocolConfig(1, 2, interval=every(4), lockstep_steps=8)
    world = Scenario(config, scripts).run(100)
    early = [m for (_, v), m in world.merged.items() if v <= 1]
    assert [len(m.contributors) for m in early] == [2]
    assert min(len(m.contributors) for m in world.merged.values()) == 1


# -------------------------------------------------------------------------------------------------------------- the end


def test_end_by_tokens_stops_at_the_present_step() -> None:
    world = Scenario(ProtocolConfig(2, 2, interval=every(8), max_tokens=600), [Script(), Script()]).run(100)
    stop = world.actions(StopAt)[0][1]
    assert isinstance(stop, StopAt)
    assert (stop.step, stop.reason) == (30, "max_tokens = 600")
    assert world.finished == "drained"


def test_end_on_request_drains_and_checkpoints() -> None:
    world = Scenario(ProtocolConfig(2, 2, interval=every(8)), [Script(), Script()], stop_requested_s=21.5).run(100)
    assert world.finished == "drained"
    assert world.actions(StopAt)[0][1] == StopAt(21, "asked to end")
    assert [type(a) for a in world.tape[-1][2][-2:]] == [Checkpoint, Finish]
    assert world.now < 24


def test_end_requested_before_anybody_joined_is_an_end() -> None:
    rig = Rig(learners=2)
    assert [type(a) for a in rig.give(StopRequested("asked to end"))] == [StopAt, Checkpoint, Finish]


def test_end_when_all_learners_end_early_drains() -> None:
    scripts = [Script(ends_after_steps=13), Script(ends_after_steps=17, step_s=1.5)]
    world = Scenario(ProtocolConfig(2, 2, quorum=2, interval=every(8), max_steps=500), scripts).run(100)
    assert world.finished == "drained"
    assert world.actions(StopAt)[-1][1].reason == "all learners are done"  # type: ignore[attr-defined]


def test_end_when_every_learner_is_lost_is_a_finish_with_a_checkpoint() -> None:
    scripts = [Script(dies_s=20.2), Script(dies_s=30.2)]
    world = Scenario(ProtocolConfig(2, 2, interval=every(8)), scripts).run(100)
    assert world.finished == "no learner is left"
    assert world.count(Checkpoint) == 1


def test_end_waits_for_a_merge_that_is_running() -> None:
    rig = Rig()
    rig.join(0)
    rig.march(8)
    rig.announce(0)
    rig.arrive(0)
    assert rig.give(LearnerLost(0, 1)) == ()
    assert [type(a) for a in rig.finish_merge()] == [Publish, Checkpoint, Finish]


def test_end_gives_every_contribution_its_answer() -> None:
    rig = Rig(learners=2, max_steps=8, drain_s=4.0)
    rig.join(0, 1)
    rig.march(8)
    rig.give(LearnerDone(0, 1))
    rig.give(LearnerDone(1, 1))
    rig.announce(0)
    rig.announce(1)
    rig.arrive(1)
    rig.tick(4.0)
    assert (rig.last(Reject).learner_id, rig.last(Reject).cause) == (0, "late")
    rig.finish_merge()
    assert rig.protocol.phase == "finished"
    tokens = rig.protocol.tokens()
    assert tokens.proposed == tokens.effective + tokens.discarded


def test_drain_asks_for_every_fragment_once_after_the_last_step() -> None:
    world = Scenario(ProtocolConfig(6, 2, interval=every(8), max_steps=20), [Script(), Script()]).run(100)
    asked = [a.fragment for _, a in world.actions(OpenRound) if isinstance(a, OpenRound) and a.drain]
    assert sorted(asked) == list(range(6))
    assert world.finished == "drained"


def test_drain_with_nothing_to_give_is_over_when_all_have_declined() -> None:
    rig = Rig(fragments=2, max_steps=4)
    rig.join(0)
    rig.march(4)
    rig.give(LearnerDone(0, 1))
    rig.announce(0, 1, declined=True)
    assert rig.protocol.phase == "draining"
    assert rig.announce(0, 2, declined=True)[-1] == Finish("drained")
    assert not rig.all(Merge)


def test_drain_without_a_learner_that_dies_in_it_goes_on() -> None:
    scripts = [Script(), Script(dies_s=20.03)]
    world = Scenario(ProtocolConfig(4, 2, interval=every(8), max_steps=20), scripts).run(100)
    assert world.finished == "drained"
    assert world.now < 23


def test_drain_without_any_learner_is_over_at_once() -> None:
    rig = Rig(fragments=24, max_steps=4)
    rig.join(0)
    rig.march(4)
    assert rig.give(LearnerLost(0, 1))[-1] == Finish("no learner is left to drain")


def test_drain_that_takes_too_long_ends_by_its_timeout() -> None:
    rig = Rig(learners=2, fragments=2, max_steps=4, drain_s=10.0)
    rig.join(0, 1)
    rig.march(4)
    begun = rig.now
    for _ in range(100):
        deadline = rig.protocol.next_deadline()
        if deadline is None:
            break
        rig.tick(deadline - rig.now)
    assert rig.protocol.phase == "finished"
    assert rig.now <= begun + 10.0


def test_nothing_happens_after_the_end() -> None:
    rig = Rig(max_steps=4)
    rig.join(0)
    rig.march(4)
    rig.give(LearnerLost(0, 1))
    assert rig.give(LearnerJoined(0, 2)) == ()
    assert rig.protocol.ignored["after the end"] == 1
    assert rig.protocol.next_deadline() is None


def test_checkpoint_comes_after_every_so_many_merges() -> None:
    config = ProtocolConfig(2, 1, interval=every(4), checkpoint_every_merges=3)
    world = Scenario(config, [Script()]).run(40)
    assert world.protocol.num_merges >= 9
    assert world.count(Checkpoint) == world.protocol.num_merges // 3


def test_checkpoint_comes_with_the_first_merge_so_long_after_the_last_one() -> None:
    config = ProtocolConfig(2, 1, interval=every(4), checkpoint_every_s=2.0)
    world = Scenario(config, [Script()]).run(40)
    written_s = [0.0, *(now for now, _ in world.actions(Checkpoint))]
    merged_s = [now for now, _ in world.actions(Publish)]
    assert len(written_s) >= 3
    for last_s, next_s in itertools.pairwise(written_s):
        assert next_s == min(at for at in merged_s if at >= last_s + 2.0)


def test_checkpoint_by_time_counts_from_one_by_merges() -> None:
    """Every third merge is a checkpoint, so that 9.5 seconds have never passed since one."""
    config = ProtocolConfig(2, 1, interval=every(4), checkpoint_every_merges=3, checkpoint_every_s=9.5)
    world = Scenario(config, [Script()]).run(80)
    merged_s = [now for now, _ in world.actions(Publish)]
    assert [now for now, _ in world.actions(Checkpoint)] == merged_s[2::3]


def test_learner_silent_for_very_long_holds_up_the_end_no_more() -> None:
    """On another host a death shows as silence only: who waits in close() must not wait for it for ever."""
    rig = Rig(learners=2, give_up_s=300.0)
    rig.join(0, 1)
    rig.walk(0, 5)
    rig.give(LearnerSilent(1, 1))
    rig.give(LearnerDone(0, 1))
    assert rig.protocol.phase == "running"
    end = rig.protocol.next_deadline()
    assert end == rig.now + 300.0
    rig.tick(300.0)
    assert [a.reason for a in rig.all(StopAt)] == ["all learners are done"]
    assert rig.protocol.phase == "draining"
