"""What one round, one fragment and one run's protocol settings are.

Here: the records that protocol.py works on. Not here: any decision. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .events import ContributionArrived, Merge
from .schedule import IntervalSchedule

__all__ = ["FragmentRecord", "ProtocolConfig", "Round", "rounds_in_flight"]


@dataclass(frozen=True)
class ProtocolConfig:
    """What the protocol has to know of a run (defaults: paper, section on hyper-parameters).

    Attributes:
        num_fragments: P.
        num_learners: M expected at the start.
        quorum: K.
        interval: H, by step.
        tau_steps: steps within which a merged fragment should land.
        in_flight: rounds open at once; 0: ceil(P * tau / H), at least 2, at most P.
        gamma: share of the slack the grace window may use, 0 <= gamma < 1.
        grace: False: no grace window at all.
        max_steps, max_tokens: the end of the run; 0: none.
        drain_s: the last rounds may take so long.
        give_up_s: who is silent for longer holds up the end of the run no more (it is welcome all the same).
        checkpoint_every_merges: a checkpoint after every so many merges; 0: not by merges.
        checkpoint_every_s: and, while the run goes on, with the first merge so long after the last
            one was due; 0: not by time.
        lockstep_steps: until this step every live learner is the quorum.
        max_tokens_per_step: more in one inner step of one learner is nonsense.
    """

    num_fragments: int
    num_learners: int
    quorum: int = 1
    interval: IntervalSchedule = field(default_factory=lambda: IntervalSchedule((0,), (24,)))
    tau_steps: int = 2
    in_flight: int = 0
    gamma: float = 0.9
    grace: bool = True
    max_steps: int = 0
    max_tokens: int = 0
    drain_s: float = 30.0
    give_up_s: float = 300.0
    checkpoint_every_merges: int = 0
    checkpoint_every_s: float = 0.0
    lockstep_steps: int = 0
    max_tokens_per_step: int = 1 << 32

    def in_flight_at(self, position: int) -> int:
        """Rounds that may be open at once at a position of the schedule."""
        return rounds_in_flight(self.in_flight, self.num_fragments, self.tau_steps, self.interval.at(position))

    @property
    def max_in_flight(self) -> int:
        """The largest value of :meth:`in_flight_at` over the run: the slots that a mailbox needs."""
        return max(self.in_flight_at(start) for start in self.interval.starts_steps)


def rounds_in_flight(configured: int, num_fragments: int, tau_steps: int, interval_steps: int) -> int:
    """Rounds that may be open at once: ``configured``, or what H asks for if that is 0; at most P.

    With ceil(P * tau / H) in flight each may last tau steps, and every fragment still has its round in H steps.
    """
    wanted = configured or max(2, math.ceil(num_fragments * tau_steps / interval_steps))
    return min(wanted, num_fragments)


@dataclass
class Round:
    """One attempt to merge one fragment; ``announced`` maps learner_id to the time of its announcement."""

    id: int
    fragment: int
    base_version: int
    opened_s: float
    opened_step: int
    previous_open: int | None
    drain: bool
    phase: str = "asking"
    announced: dict[int, float] = field(default_factory=dict)
    declined: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    arrived: dict[int, ContributionArrived] = field(default_factory=dict)
    grace_end_s: float | None = None
    wait_end_s: float | None = None
    waited_for: frozenset[int] = frozenset()
    closed_s: float | None = None
    merge: Merge | None = None

    def forget(self, learner_id: int) -> None:
        """Undo whatever a learner's earlier incarnation has said."""
        self.announced.pop(learner_id, None)
        self.declined.discard(learner_id)
        self.dropped.discard(learner_id)

    def awaited(self) -> list[int]:
        """Learners whose announced payload is still on its way."""
        return [m for m in self.announced if m not in self.arrived and m not in self.dropped]


@dataclass
class FragmentRecord:
    """Where one fragment stands."""

    version: int = 0  # the newest published
    last_version: int = 0  # the newest handed out; raised before use, never reused
    last_open: int | None = None  # clock step at which its last round was opened
    last_merge: int | None = None  # clock step of its last merge
    drained: bool = False
