"""What the syncer knows of one learner: its clock, its averages, its share in the merges, its tokens.

Here: plain bookkeeping with its invariants. Not here: any decision (protocol.py). Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LearnerRecord", "TokenLedger", "average"]

_SMOOTHING = 0.5  # of every moving average; not published in the paper, ours
_KEPT_ANSWERS = 256  # rounds; what is older than that is on no board and in no slot


def average(old: float | None, sample: float, *, ceiling: float | None = None) -> float:
    """Exponential moving average, seeded by the first sample; a sample above ``ceiling`` counts as ``ceiling``.

    The ceiling keeps one outlier (a learner stopped for a minute) from shutting the grace window for long.
    """
    if ceiling is not None:
        sample = min(sample, ceiling)
    return sample if old is None else _SMOOTHING * sample + (1 - _SMOOTHING) * old


@dataclass
class TokenLedger:
    """Tokens under five names that are never mixed (all int, unbounded).

    ``processed`` counts a token once; the others count it once per fragment that carried it.
    Invariant: proposed == effective + discarded + (proposals that no round has decided yet), selected >= effective.
    """

    processed: int = 0
    proposed: int = 0
    selected: int = 0
    effective: int = 0
    discarded: int = 0

    def add(self, other: TokenLedger) -> None:
        """Count what ``other`` has counted."""
        self.processed += other.processed
        self.proposed += other.proposed
        self.selected += other.selected
        self.effective += other.effective
        self.discarded += other.discarded


@dataclass
class LearnerRecord:
    """One learner as its boards and its contributions show it.

    Attributes:
        state: training, closing (in ``close()``, still answering), or lost.
        finished: it has said that it trains no more, whatever became of it later.
        silent_since_s: when its heartbeat was missed; it is not waited for until it moves. None: it beats.
        step: its clock t_m; ``num_steps``: inner steps really made.
        step_s: moving average of the duration of its steps; ``transfer_s``: of announcement to arrival.
        used_base: per fragment, the base version of its last contribution that was not refused.
        misses: per fragment, rounds running in which it was live and did not take part.
        answered: rounds whose contribution has had its one answer; the value is the time of the announcement while
            the payload is still on its way, else None.
    """

    learner_id: int
    incarnation: int
    joined_s: float
    step: int
    state: str = "training"
    silent_since_s: float | None = None
    finished: bool = False
    num_steps: int = 0
    last_progress_s: float = 0.0
    step_s: float | None = None
    transfer_s: float | None = None
    num_merged: int = 0
    used_base: dict[int, int] = field(default_factory=dict)
    misses: dict[int, int] = field(default_factory=dict)
    answered: dict[int, float | None] = field(default_factory=dict)
    tokens: TokenLedger = field(default_factory=TokenLedger)

    @property
    def silent(self) -> bool:
        """Not heard of at present."""
        return self.silent_since_s is not None

    @property
    def is_live(self) -> bool:
        """Counts towards K and is waited for in the grace window."""
        return self.state == "training" and not self.silent

    @property
    def can_answer(self) -> bool:
        """May still contribute: training or in ``close()``, and moving."""
        return self.state in ("training", "closing") and not self.silent

    def take_progress(self, now: float, step: int, num_steps: int, tokens: int, *, clip: float) -> None:
        """Adopt a checked progress report; a step slower than ``clip`` times the average counts as that."""
        made = num_steps - self.num_steps
        if made > 1 and self.num_steps == 0:
            self.last_progress_s = now  # it ran before the syncer knew it: no measure of its pace
        elif made > 0:
            sample = (now - self.last_progress_s) / made
            self.step_s = average(self.step_s, sample, ceiling=None if self.step_s is None else clip * self.step_s)
            self.last_progress_s = now
        self.step, self.num_steps, self.tokens.processed = step, num_steps, tokens

    def note_answer(self, round_id: int, announced_s: float | None) -> None:
        """Remember that the contribution to ``round_id`` has had its answer."""
        self.answered[round_id] = announced_s
        if len(self.answered) > 2 * _KEPT_ANSWERS:
            for old in sorted(self.answered)[:-_KEPT_ANSWERS]:
                del self.answered[old]
