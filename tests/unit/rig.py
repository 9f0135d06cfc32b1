"""Gives the protocol single events by hand, for tests of one decision.

Here: short forms of the events, with defaults that pass every check. Not here: a world (scenario.py).
"""

from __future__ import annotations

from typing import Any, TypeVar

from scenario import TOKENS_PER_STEP, every

from pyddl.core.events import (
    Action,
    Announced,
    ContributionArrived,
    Event,
    LearnerJoined,
    MergeDone,
    OpenRound,
    Progress,
    Tick,
)
from pyddl.core.protocol import Protocol, ProtocolConfig

AnAction = TypeVar("AnAction", bound=Action)


class Rig:
    """A protocol, its clock, and what it has said so far."""

    def __init__(
        self,
        *,
        learners: int = 1,
        fragments: int = 1,
        interval: int = 8,
        protocol: Any = Protocol,
        **config: Any,
    ) -> None:
        self.protocol: Protocol = protocol(ProtocolConfig(fragments, learners, interval=every(interval), **config))
        self.now = 0.0
        self.said: list[Action] = []

    def give(self, event: Event, *, after_s: float = 0.0) -> tuple[Action, ...]:
        self.now += after_s
        actions = self.protocol.handle(event, self.now)
        self.protocol.check()
        self.said.extend(actions)
        return actions

    def all(self, kind: type[AnAction]) -> list[AnAction]:
        return [a for a in self.said if isinstance(a, kind)]

    def last(self, kind: type[AnAction]) -> AnAction:
        return self.all(kind)[-1]

    def join(self, *learner_ids: int, incarnation: int = 1) -> tuple[Action, ...]:
        return sum((self.give(LearnerJoined(m, incarnation)) for m in learner_ids), ())

    def walk(self, learner_id: int, to_step: int, step_s: float = 1.0) -> tuple[Action, ...]:
        """Progress, one report for all the steps, each ``step_s`` long."""
        m = self.protocol.learners[learner_id]
        made = to_step - m.step
        num_steps = m.num_steps + made
        return self.give(
            Progress(learner_id, m.incarnation, to_step, num_steps, num_steps * TOKENS_PER_STEP),
            after_s=made * step_s,
        )

    def march(self, to_step: int) -> tuple[Action, ...]:
        """All learners side by side, step by step, one second each."""
        actions: tuple[Action, ...] = ()
        start = min(m.step for m in self.protocol.learners.values())
        for step in range(start + 1, to_step + 1):
            self.now += 1.0
            for learner_id in self.protocol.learners:
                actions += self.walk(learner_id, step, step_s=0.0)
        return actions

    def announce(self, learner_id: int, round_id: int | None = None, **fields: Any) -> tuple[Action, ...]:
        m = self.protocol.learners[learner_id]
        number = self.last(OpenRound).round if round_id is None else round_id
        return self.give(Announced(learner_id, m.incarnation, number, **fields))

    def arrive(self, learner_id: int, round_id: int | None = None, **fields: Any) -> tuple[Action, ...]:
        m = self.protocol.learners[learner_id]
        opened = {a.round: a for a in self.all(OpenRound)}
        r = self.last(OpenRound) if round_id is None else opened[round_id]
        values = {
            "incarnation": m.incarnation,
            "fragment": r.fragment,
            "base_version": r.base_version,
            "step": m.step,
            "c_steps": 1,
            "c_tokens": TOKENS_PER_STEP,
            **fields,
        }
        return self.give(ContributionArrived(learner_id, round=r.round, **values))

    def finish_merge(self, round_id: int | None = None, **fields: Any) -> tuple[Action, ...]:
        number = self.last(OpenRound).round if round_id is None else round_id
        return self.give(MergeDone(number, **fields))

    def tick(self, after_s: float = 0.0) -> tuple[Action, ...]:
        return self.give(Tick(), after_s=after_s)
