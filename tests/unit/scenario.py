"""Drives the protocol through a scripted world in virtual time, for the tests beside it.

Here: learners that follow a script (pace, links, deaths, stops, poisoned pushes), the syncer's polling, and what came
of it: participation, achieved H, Theta, a transcript. Not here: MPI, tensors, threads, real time.

A learner's parameters are one number per fragment, and every inner step adds ``rate`` to it: its *progress*. The outer
step is SGD with lr 1 on the weighted mean, so progress that is counted twice, or lost, shows in Theta.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    StopAt,
    StopRequested,
    Tick,
)
from pyddl.core.protocol import Protocol, ProtocolConfig
from pyddl.core.schedule import IntervalSchedule

TOKENS_PER_STEP = 10
NEVER = math.inf
_BLINK_S = 1e-3  # how long a learner inside close() takes to look at its board


def every(steps: int) -> IntervalSchedule:
    """H = ``steps`` for the whole run."""
    return IntervalSchedule((0,), (steps,))


@dataclass(frozen=True)
class Script:
    """What one learner does; times in seconds of the virtual clock.

    Attributes:
        step_s: duration of an inner step; a function gets the number of the step.
        link_s: from announcement to arrival; a function gets the time of the announcement.
        down_s: from Publish to receipt.
        dies_s: end of its process; seen ``seen_s`` later. ``rejoins_s``: its next incarnation joins.
        stops: (from, to) during which the process stands still (SIGSTOP).
        ends_after_steps: inner steps after which it trains no more.
        poisoned: (fragment, time) -> its payload holds a NaN. ``damaged``: its payload cannot be read.
        rate: progress of one inner step.
        receipt: replace or rebase (rule 5).
        pushes_again: breaks rule 4: answers although its last push has had no receipt.
    """

    step_s: float | Callable[[int], float] = 1.0
    link_s: float | Callable[[float], float] = 0.1
    down_s: float = 0.1
    joins_s: float = 0.0
    dies_s: float = NEVER
    seen_s: float = 0.5
    rejoins_s: float = NEVER
    stops: tuple[tuple[float, float], ...] = ()
    ends_after_steps: float = NEVER
    poisoned: Callable[[int, float], bool] = lambda fragment, now: False
    damaged: Callable[[int, float], bool] = lambda fragment, now: False
    rate: float = 1.0
    receipt: str = "replace"
    pushes_again: bool = False


@dataclass
class _Push:
    round: int
    at_push: float
    c_steps: int
    c_tokens: int


class ScriptedLearner:
    """One learner: rules 2, 4 and 5 from its side of the mailbox."""

    def __init__(self, world: Scenario, learner_id: int, script: Script) -> None:
        self.world, self.id, self.script = world, learner_id, script
        self.incarnation = 0
        self.alive = False
        self.made = Counter[str]()  # over all incarnations
        world.at(script.joins_s, self.join)
        if script.dies_s < NEVER:
            world.at(script.dies_s, self.die)
        if script.rejoins_s < NEVER:
            world.at(script.rejoins_s, self.join)

    def join(self) -> None:
        world = self.world
        self.incarnation += 1
        self.alive, self.closing = True, False
        self.step, self.num_steps = world.protocol.step, 0
        self.versions = list(world.versions)
        self.local, self.base = list(world.theta), list(world.theta)
        self.c_steps, self.c_tokens = [0] * len(self.local), [0] * len(self.local)
        self.pushed: dict[int, _Push] = {}
        self.inbox: dict[int, tuple[int, float, Publish]] = {}
        self.declined: set[int] = set()
        world.post(LearnerJoined(self.id, self.incarnation))
        self._beat()
        self._next_boundary()

    def die(self) -> None:
        self.alive = False
        lost = LearnerLost(self.id, self.incarnation)
        self.world.at(self.world.now + self.script.seen_s, lambda: self.world.post(lost))

    def _while_alive(self, action: Callable[[], None]) -> Callable[[], None]:
        incarnation = self.incarnation
        return lambda: action() if self.alive and self.incarnation == incarnation else None

    def _after(self, duration_s: float, action: Callable[[], None]) -> None:
        """Schedule what this process does; while it is stopped nothing of it goes on."""
        now, end = self.world.now, self.world.now + duration_s
        for begin, until in self.script.stops:
            if begin < end and now < until:
                end += until - max(begin, now)
        self.world.at(end, self._while_alive(action))

    def _next_boundary(self) -> None:
        step_s = self.script.step_s
        self._after(step_s(self.num_steps) if callable(step_s) else step_s, self.boundary)

    def boundary(self) -> None:
        self.step, self.num_steps = self.step + 1, self.num_steps + 1
        self.made["steps"] += 1
        for p in range(len(self.local)):
            self.local[p] += self.script.rate
            self.c_steps[p] += 1
            self.c_tokens[p] += TOKENS_PER_STEP
        self.receive(max(2, len(self.inbox) // 4))
        self.world.post(
            Progress(self.id, self.incarnation, self.step, self.num_steps, self.num_steps * TOKENS_PER_STEP)
        )
        self._beat()
        self.answer()
        stop = self.world.stop_step
        past_stop = stop is not None and max(self.step, self.world.protocol.step) >= stop
        if past_stop or self.num_steps >= self.script.ends_after_steps:
            self.closing = True
            self.world.post(LearnerDone(self.id, self.incarnation))
            self.poke()
        else:
            self._next_boundary()

    def _beat(self) -> None:
        seen = self.num_steps

        def check() -> None:
            if self.num_steps == seen and not self.closing:
                self.world.post(LearnerSilent(self.id, self.incarnation))

        if self.world.heartbeat_s < NEVER:
            self.world.at(self.world.now + self.world.heartbeat_s, self._while_alive(check))

    def poke(self) -> None:
        """Inside close() there are no boundaries: look at the board whenever something has changed."""

        def look() -> None:
            if self.closing:
                self.receive(len(self.inbox))
                self.answer()

        if self.alive and self.closing:
            self._after(_BLINK_S, look)

    def receive(self, most: int) -> None:
        """Rules 5 and 12: apply what has arrived, longest waiting first."""
        for p in list(self.inbox)[:most]:
            version, theta, publish = self.inbox.pop(p)
            push = self.pushed.pop(p, None)
            if self.script.receipt == "replace":
                self.local[p], self.c_steps[p], self.c_tokens[p] = theta, 0, 0
            elif push is not None and push.round == publish.round and self.id in publish.merged:
                self.local[p] = theta + (self.local[p] - push.at_push)
                self.c_steps[p] -= push.c_steps
                self.c_tokens[p] -= push.c_tokens
            else:
                self.local[p] = theta + (self.local[p] - self.base[p])
            self.base[p], self.versions[p] = theta, version
            self.step = max(self.step, publish.step)

    def answer(self) -> None:
        """Rules 2 and 4: answer the open rounds whose fragment is ready, else wait."""
        for r in list(self.world.board.values()):
            p = r.fragment
            if not self.script.pushes_again:
                if p in self.pushed or p in self.inbox or self.versions[p] != r.base_version:
                    continue
            elif p in self.pushed and self.pushed[p].round == r.round:
                continue
            if self.c_steps[p] >= 1:
                self._push(r)
            elif r.drain and self.closing and r.round not in self.declined:
                self.declined.add(r.round)
                self.world.post(Announced(self.id, self.incarnation, r.round, declined=True))

    def _push(self, r: OpenRound) -> None:
        world, p, now = self.world, r.fragment, self.world.now
        self.pushed[p] = _Push(r.round, self.local[p], self.c_steps[p], self.c_tokens[p])
        world.payloads[self.id, self.incarnation, r.round] = (
            math.nan if self.script.poisoned(p, now) else self.local[p] - self.base[p]
        )
        world.post(Announced(self.id, self.incarnation, r.round))
        arrival: Event = ContributionArrived(
            self.id,
            self.incarnation,
            r.round,
            p,
            self.versions[p],
            self.step,
            self.c_steps[p],
            self.c_tokens[p],
        )
        if self.script.damaged(p, now):
            arrival = ContributionDamaged(self.id, self.incarnation, r.round, "wrong checksum")
        link_s = self.script.link_s
        self._after(link_s(now) if callable(link_s) else link_s, lambda: world.post(arrival))

    def be_refused(self, reject: Reject) -> None:
        for p, push in list(self.pushed.items()):
            if push.round == reject.round and reject.incarnation == self.incarnation:
                del self.pushed[p]
                self.poke()

    def take(self, fragment: int, version: int, theta: float, publish: Publish) -> None:
        old = self.inbox.get(fragment)
        if version > self.versions[fragment] and (old is None or version > old[0]):
            self.inbox[fragment] = (version, theta, publish)
            self.poke()


class Scenario:
    """A run. After :meth:`run`, look at its attributes.

    Attributes:
        theta: [P] the global model. ``versions``: [P].
        merges: merges by fragment. ``took_part``: by (learner, fragment).
        merged: contributors by (fragment, version).
        clock: (time, t) at every change of t.
        rejects: all Reject actions. ``finished``: reason of Finish, or None.
        tape: (time, event, actions) of everything the protocol was given.
    """

    def __init__(
        self,
        config: ProtocolConfig,
        scripts: Sequence[Script],
        *,
        protocol: type[Protocol] = Protocol,
        poll_s: float = 0.05,
        merge_s: float = 0.05,
        heartbeat_s: float = NEVER,
        stop_requested_s: float = NEVER,
    ) -> None:
        self.config, self.protocol = config, protocol(config)
        self.poll_s, self.merge_s, self.heartbeat_s = poll_s, merge_s, heartbeat_s
        self.now = 0.0
        self.theta = [0.0] * config.num_fragments
        self.versions = [0] * config.num_fragments
        self.merges: Counter[int] = Counter()
        self.took_part: Counter[tuple[int, int]] = Counter()
        self.merged: dict[tuple[int, int], Merge] = {}
        self.clock: list[tuple[float, int]] = [(0.0, 0)]
        self.rejects: list[Reject] = []
        self.finished: str | None = None
        self.stop_step: int | None = None
        self.tape: list[tuple[float, Event, tuple[Action, ...]]] = []
        self.board: dict[int, OpenRound] = {}
        self.payloads: dict[tuple[int, int, int], float] = {}
        self._mail: list[Event] = []
        self._merging: dict[int, Merge] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake_s = -1.0
        self.learners = [ScriptedLearner(self, m, script) for m, script in enumerate(scripts)]
        if stop_requested_s < NEVER:
            self.at(stop_requested_s, lambda: self.post(StopRequested("asked to end")))

    def run(self, until_s: float) -> Scenario:
        """Go on until ``until_s`` or Finish."""
        while self._queue and self.finished is None and self._queue[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return self

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(time_s, self.now), next(self._order), action))

    def post(self, event: Event) -> None:
        """Put an event where the syncer's next poll finds it; of a board only the newest words are seen."""
        if isinstance(event, Progress):
            self._mail = [e for e in self._mail if not (isinstance(e, Progress) and e.learner_id == event.learner_id)]
        self._mail.append(event)
        self._wake(self.now)

    def _wake(self, time_s: float) -> None:
        due = (math.floor(time_s / self.poll_s) + 1) * self.poll_s
        if self._wake_s <= self.now or due < self._wake_s:
            self._wake_s = due
            self.at(due, self._poll)

    def _poll(self) -> None:
        mail, self._mail = self._mail, []
        for event in mail or [Tick()]:
            self._handle(event)
        deadline = self.protocol.next_deadline()
        if deadline is not None and self.finished is None:
            self._wake(max(deadline, self.now))

    def _handle(self, event: Event) -> None:
        actions = self.protocol.handle(event, self.now)
        self.protocol.check()
        self.tape.append((self.now, event, actions))
        if self.protocol.step != self.clock[-1][1]:
            self.clock.append((self.now, self.protocol.step))
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, OpenRound):
            self.board[action.round] = action
        elif isinstance(action, CloseRound):
            del self.board[action.round]
        elif isinstance(action, Merge):
            merge = action
            self.at(self.now + self.merge_s, lambda: self._merge(merge))
        elif isinstance(action, Publish):
            self._publish(action)
        elif isinstance(action, Reject):
            self.rejects.append(action)
            if action.learner_id < len(self.learners) and self.learners[action.learner_id].alive:
                self.learners[action.learner_id].be_refused(action)
        elif isinstance(action, StopAt):
            self.stop_step = action.step
        elif isinstance(action, Finish):
            self.finished = action.reason
        for learner in self.learners:
            learner.poke() if learner.incarnation else None

    def _merge(self, merge: Merge) -> None:
        values = {c: self.payloads[c.learner_id, c.incarnation, merge.round] for c in merge.contributors}
        poisoned = tuple((c.learner_id, "holds a NaN") for c, v in values.items() if math.isnan(v))
        good = {c: v for c, v in values.items() if not math.isnan(v)}
        if good:
            total = sum(c.weight for c in good)
            self.theta[merge.fragment] += sum(c.weight * v for c, v in good.items()) / total
        for c in good:
            self.took_part[c.learner_id, merge.fragment] += 1
        self._merging[merge.round] = merge
        self._handle(MergeDone(merge.round, poisoned))
        self._wake(self.now)

    def _publish(self, publish: Publish) -> None:
        p, version, theta = publish.fragment, publish.version, self.theta[publish.fragment]
        self.versions[p] = version
        self.merges[p] += 1
        self.merged[p, version] = self._merging.pop(publish.round)
        for learner in self.learners:
            if learner.alive:
                deliver = learner._while_alive(lambda m=learner: m.take(p, version, theta, publish))
                self.at(self.now + learner.script.down_s, deliver)

    # ------------------------------------------------------------------------------------------------- what came of it

    def participation(self, learner_id: int, fragments: Sequence[int] | None = None) -> float:
        """Merges that hold a contribution of the learner / merges."""
        chosen = range(self.config.num_fragments) if fragments is None else fragments
        return sum(self.took_part[learner_id, p] for p in chosen) / max(1, sum(self.merges[p] for p in chosen))

    def count(self, kind: type[Action]) -> int:
        """Actions of one kind over the whole run."""
        return sum(isinstance(a, kind) for _, _, actions in self.tape for a in actions)

    def actions(self, kind: type[Action]) -> list[tuple[float, Action]]:
        """(time, action) of one kind over the whole run."""
        return [(now, a) for now, _, actions in self.tape for a in actions if isinstance(a, kind)]

    def transcript(self) -> str:
        """Every event that did something or came from a learner, and what was done about it."""
        lines = []
        for now, event, actions in self.tape:
            if actions or not isinstance(event, (Progress, Tick)):
                lines.append(f"{now:8.2f} > {_words(event)}")
            lines.extend(f"         < {_words(a)}" for a in actions)
        return "\n".join(lines) + "\n"


def _words(item: Event | Action) -> str:
    fields = dict(vars(item))
    if isinstance(item, Merge):
        fields["contributors"] = ",".join(f"{c.learner_id}*{c.weight:g}" for c in item.contributors)
    return " ".join([type(item).__name__, *(f"{k}={v}" for k, v in fields.items() if k != "incarnation")])
