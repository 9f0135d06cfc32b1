"""Random schedules against a deliberately dumb second set of books.

Learners here keep no rule at all: they announce late and twice, answer closed rounds, come back as other incarnations,
claim other bases, fall silent, die. Whatever they do, the books below must add up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from scenario import every

from pyddl.core.events import (
    Action,
    Announced,
    CloseRound,
    ContributionArrived,
    ContributionDamaged,
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
    StopRequested,
    Tick,
)
from pyddl.core.protocol import Protocol, ProtocolConfig

NUM_EVENTS = 150
DRAIN_S = 20.0
Key = tuple[int, int, int]  # learner_id, incarnation, round


class Books:
    """What an observer knows who sees the events and the actions and nothing else."""

    def __init__(self, config: ProtocolConfig) -> None:
        self.config = config
        self.current: dict[int, int] = {}  # learner -> incarnation, while not lost
        self.asking: dict[int, OpenRound] = {}
        self.merging: dict[int, Merge] = {}
        self.last_round = 0
        self.published = [0] * config.num_fragments
        self.handed_out = [0] * config.num_fragments
        self.arrivals: dict[Key, list[ContributionArrived]] = {}
        self.answers: dict[Key, str] = {}  # open, refused, merged
        self.used: set[tuple[int, int, int, int]] = set()  # learner, incarnation, fragment, base
        self.effective_tokens = 0
        self.finished = False
        self.newest: dict[int, int] = {}  # learner -> its newest incarnation, lost or not

    def see_event(self, e: Event) -> None:
        number = getattr(e, "round", 0)
        self.unasked = number if number > self.last_round else None
        if self.finished or self.unasked:
            return
        if isinstance(e, LearnerJoined):
            if e.incarnation > self.newest.get(e.learner_id, 0):
                self.newest[e.learner_id] = self.current[e.learner_id] = e.incarnation
        elif isinstance(e, LearnerLost):
            if self.current.get(e.learner_id) == e.incarnation:
                del self.current[e.learner_id]
        elif isinstance(e, (Announced, ContributionArrived, ContributionDamaged)):
            key = (e.learner_id, e.incarnation, e.round)
            if self.current.get(e.learner_id) != e.incarnation:
                return
            if isinstance(e, ContributionArrived):
                self.arrivals.setdefault(key, []).append(e)
            announced = isinstance(e, Announced)
            if announced and e.declined:
                return
            if key not in self.answers or (announced and self.answers[key] == "refused" and e.round in self.asking):
                self.answers[key] = "open"

    def see_actions(self, event: Event, actions: tuple[Action, ...]) -> None:
        ended = self.merging.pop(event.round) if isinstance(event, MergeDone) else None
        for a in actions:
            assert not self.finished, a
            if isinstance(a, OpenRound):
                assert a.round > self.last_round, "round ids are never reused"
                self.last_round = a.round
                assert a.base_version == self.published[a.fragment]
                assert a.fragment not in [r.fragment for r in self.asking.values()]
                assert a.fragment not in [m.fragment for m in self.merging.values()]
                self.asking[a.round] = a
                assert len(self.asking) + len(self.merging) <= self.config.max_in_flight
            elif isinstance(a, CloseRound):
                del self.asking[a.round]
            elif isinstance(a, Merge):
                self._see_merge(a)
            elif isinstance(a, Publish):
                assert isinstance(event, MergeDone)
                assert ended is not None
                self._see_publish(a, event, ended)
            elif isinstance(a, Reject) and a.round not in (0, self.unasked):
                key = (a.learner_id, a.incarnation, a.round)
                assert self.answers.get(key) == "open", f"a second answer, or one to nobody: {a}"
                self.answers[key] = "refused"
            elif isinstance(a, Finish):
                self.finished = True

    def _see_merge(self, a: Merge) -> None:
        assert a.round not in self.asking
        assert a.fragment not in [m.fragment for m in self.merging.values()]
        assert a.version == self.handed_out[a.fragment] + 1
        assert a.base_version == self.published[a.fragment]
        self.handed_out[a.fragment] = a.version
        self.merging[a.round] = a
        ids = [c.learner_id for c in a.contributors]
        assert ids
        assert ids == sorted(set(ids))
        for c in a.contributors:
            wanted = (a.fragment, c.base_version, c.step, c.c_steps, c.c_tokens)
            arrived = self.arrivals[c.learner_id, c.incarnation, a.round]
            e = next(e for e in arrived if (e.fragment, e.base_version, e.step, e.c_steps, e.c_tokens) == wanted)
            assert 0 <= a.base_version - e.base_version <= 2
            assert c.weight == e.c_tokens**2 / e.c_steps
            assert (c.learner_id, c.incarnation, a.fragment, c.base_version) not in self.used

    def _see_publish(self, a: Publish, event: MergeDone, merge: Merge) -> None:
        assert a.round == event.round
        assert (a.fragment, a.version) == (merge.fragment, merge.version)
        assert a.version > self.published[a.fragment]
        self.published[a.fragment] = a.version
        refused = {m for m, _ in event.rejected}
        good = [c for c in merge.contributors if c.learner_id not in refused]
        assert list(a.merged) == [c.learner_id for c in good if self.newest[c.learner_id] == c.incarnation]
        for c in good:
            self.effective_tokens += c.c_tokens
            self.used.add((c.learner_id, c.incarnation, a.fragment, c.base_version))
            key = (c.learner_id, c.incarnation, a.round)
            assert self.answers[key] == "open", "merged although it was told `not merged`"
            self.answers[key] = "merged"

    def unanswered(self) -> list[Key]:
        """Contributions of learners that still live and have not been told what became of them."""
        return [k for k, v in self.answers.items() if v == "open" and self.current.get(k[0]) == k[1]]


class World:
    """A seeded source of events without any manners."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        learners = rng.randint(1, 4)
        self.config = ProtocolConfig(
            num_fragments=rng.randint(1, 4),
            num_learners=learners,
            quorum=rng.randint(1, learners),
            interval=every(rng.randint(1, 6)),
            in_flight=rng.choice((0, 1, 3)),
            grace=rng.random() < 0.8,
            drain_s=DRAIN_S,
            max_steps=rng.choice((0, 0, 30)),
            lockstep_steps=rng.choice((0, 0, 5)),
        )
        self.protocol, self.books = Protocol(self.config), Books(self.config)
        self.now = 0.0
        self.given: list[Event] = []
        self.ids = range(learners + (rng.random() < 0.2))
        self.steps: dict[int, tuple[int, int]] = {}  # learner -> (step, num_steps)

    def give(self, event: Event) -> None:
        before = self.protocol.step
        self.books.see_event(event)
        actions = self.protocol.handle(event, self.now)
        self.books.see_actions(event, actions)
        self.protocol.check()
        assert self.protocol.step >= before, "the clock fell"
        self.given.append(event)

    def incarnation(self, learner_id: int) -> int:
        newest = self.books.newest.get(learner_id, 1)
        return max(1, newest + self.rng.choice((-1, 1))) if self.rng.random() < 0.04 else newest

    def round(self) -> int:
        if self.protocol.rounds and self.rng.random() < 0.9:
            return self.rng.choice(list(self.protocol.rounds))
        return self.rng.randint(1, self.books.last_round + 1)

    def join(self, m: int) -> None:
        newest = self.books.newest.get(m, 0)
        again = newest > 0 and self.rng.random() < 0.1
        if not again:
            self.steps[m] = (self.protocol.step, 0)
        self.give(LearnerJoined(m, newest + (not again)))

    def progress(self, m: int) -> None:
        step, num_steps = self.steps.get(m, (0, 0))
        made = self.rng.choice((1, 1, 1, 2, 0, 9))
        step, num_steps = max(step, self.protocol.step * (self.rng.random() < 0.3)) + made, num_steps + made
        self.steps[m] = (step, num_steps)
        self.give(Progress(m, self.incarnation(m), step, num_steps, 10 * num_steps))

    def announce(self, m: int) -> None:
        self.give(Announced(m, self.incarnation(m), self.round(), declined=self.rng.random() < 0.1))

    def arrive(self, m: int) -> None:
        rng, number = self.rng, self.round()
        r = self.protocol.rounds.get(number)
        fragment = r.fragment if r and rng.random() < 0.95 else rng.randrange(self.config.num_fragments)
        base = self.books.published[fragment] - (rng.choice((0, 1, 2, 3, -1)) if rng.random() < 0.2 else 0)
        c_steps = rng.choice((1, 2, 3, 5, 8)) if rng.random() < 0.95 else rng.choice((-1, 0, 10**7))
        step = self.steps.get(m, (0, 0))[0]
        event = ContributionArrived(m, self.incarnation(m), number, fragment, base, step, c_steps, 10 * c_steps)
        if rng.random() < 0.05:
            self.give(ContributionDamaged(m, event.incarnation, number, "wrong checksum"))
        else:
            self.give(event)

    def finish_merge(self, m: int) -> None:
        if self.books.merging:
            merge = self.rng.choice(list(self.books.merging.values()))
            bad = [c.learner_id for c in merge.contributors if self.rng.random() < 0.1]
            self.give(MergeDone(merge.round, tuple((b, "holds a NaN") for b in bad)))

    def repeat(self, m: int) -> None:
        old = [e for e in self.given if isinstance(e, (Announced, ContributionArrived))]
        if old:
            self.give(self.rng.choice(old[-20:]))

    def do_something(self) -> None:
        rng, m = self.rng, self.rng.choice(self.ids)
        self.now += rng.choice((0.0, 0.01, 0.1, 0.5, 1.0))
        deadline = self.protocol.next_deadline()
        if deadline is not None and rng.random() < 0.1:
            self.now = max(self.now, deadline)
        verbs: list[tuple[float, Callable[[int], None]]] = [
            (8, self.progress),
            (8, self.announce),
            (8, self.arrive),
            (4, self.finish_merge),
            (1, self.repeat),
            (0.5, self.join),
            (1, lambda m: self.give(Tick())),
            (0.3, lambda m: self.give(LearnerSilent(m, self.incarnation(m)))),
            (0.2, lambda m: self.give(LearnerLost(m, self.incarnation(m)))),
            (0.1, lambda m: self.give(LearnerDone(m, self.incarnation(m)))),
        ]
        rng.choices([v for _, v in verbs], [w for w, _ in verbs])[0](m)

    def settle(self) -> None:
        """Nobody says anything any more: only time passes and merges end."""
        self.give(Tick())
        for _ in range(200):
            if self.books.merging:
                self.give(MergeDone(next(iter(self.books.merging))))
                continue
            deadline = self.protocol.next_deadline()
            if deadline is None:
                return
            assert deadline > self.now, "a deadline that had passed"
            self.now = max(self.now, deadline)
            self.give(Tick())
        raise AssertionError("some wait never ends")


@pytest.mark.parametrize("block", range(10))
def test_books_of_any_schedule_add_up(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        world = World(seed)
        try:
            for m in list(world.ids):
                world.join(m)
            for _ in range(NUM_EVENTS):
                world.do_something()
            world.settle()
            for r in world.protocol.rounds.values():
                assert r.phase == "asking", "a round that nobody waits for"
                assert r.grace_end_s is None
            world.give(StopRequested("end of the test"))
            begun = world.now
            world.settle()
            assert world.books.finished, "the run never ends"
            assert world.now <= begun + DRAIN_S + 1e-6
            assert not world.books.unanswered()
            tokens = world.protocol.tokens()
            assert tokens.effective == world.books.effective_tokens
            assert tokens.proposed == tokens.effective + tokens.discarded
            assert tokens.selected >= tokens.effective
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {len(world.given)} events: {error}") from error


def test_books_see_enough_to_be_worth_it() -> None:
    """The schedules above reach what they are meant to test."""
    kinds: dict[str, int] = {}
    merges = 0
    for seed in range(30):
        world = World(seed)
        for m in list(world.ids):
            world.join(m)
        for _ in range(NUM_EVENTS):
            world.do_something()
        merges += world.protocol.num_merges
        for kind, count in world.protocol.rejected.items():
            kinds[kind] = kinds.get(kind, 0) + count
    assert merges > 100
    assert {"late", "duplicate base", "damaged", "not finite", "too few learners", "no progress"} <= set(kinds)
