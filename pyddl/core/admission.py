"""What the syncer takes from a learner, and why it refuses the rest (rules 4 and 8 of docs/architecture.md).

Here: predicates over one report and what is known of its learner; each answers with the reason. Not here: what follows
from a refusal (protocol.py). Standard library only.
"""

from __future__ import annotations

from .events import ContributionArrived, Progress
from .ledger import LearnerRecord
from .rounds import Round

__all__ = ["contribution_refusal", "is_duplicate", "progress_refusal"]

_MAX_BASE_AGE = 2  # versions; older bases are refused
_MAX_STEPS_PER_S = 1e5  # faster progress is nonsense
_BURST_STEPS = 1000  # allowed at once, on top of the rate


def progress_refusal(m: LearnerRecord, e: Progress, now: float, *, clock: int, max_tokens_per_step: int) -> str | None:
    """Rule 8: progress may not fall nor grow faster than limits."""
    made = e.num_steps - m.num_steps
    if made < 0 or e.step < m.step or e.tokens < m.tokens.processed:
        was = f"{m.step}/{m.num_steps}/{m.tokens.processed}"
        return f"steps and tokens may not fall; {was} became {e.step}/{e.num_steps}/{e.tokens}"
    if e.step > max(m.step, clock) + made:
        return f"a step may grow by the {made} inner steps made from {max(m.step, clock)}; got {e.step}"
    if made > _most_steps(m, now):
        return f"{made} inner steps in {now - m.last_progress_s:.3f} s are more than a learner can make"
    # the words for steps and tokens are read one after the other: one step of slack
    if e.tokens - m.tokens.processed > (made + 1) * max_tokens_per_step:
        return f"{e.tokens - m.tokens.processed} tokens in {made} steps are more than max_tokens_per_step allows"
    return None


def contribution_refusal(
    m: LearnerRecord,
    r: Round | None,
    e: ContributionArrived,
    now: float,
    *,
    version: int,
    duplicate: bool,
    max_tokens_per_step: int,
) -> tuple[str, str] | None:
    """Why a contribution may not be merged, as (cause, sentence).

    Args:
        m: its learner.
        r: its round, if that is open.
        e: the contribution.
        now: seconds of the driver's clock.
        version: the newest of the round's fragment.
        duplicate: what :func:`is_duplicate` says.
        max_tokens_per_step: more in one inner step is nonsense.
    """
    if r is None:
        return "late", f"round {e.round} is closed"
    if m.learner_id in r.dropped:
        return "late", f"round {r.id} no longer waits for learner {m.learner_id}"
    if m.learner_id in r.arrived:
        return "twice", "an earlier incarnation's contribution is in this round"
    if e.fragment != r.fragment:
        return "wrong fragment", f"round {r.id} is for fragment {r.fragment}; got {e.fragment}"
    if e.base_version > version:
        return "future base", f"the newest version is {version}; got {e.base_version}"
    if version - e.base_version > _MAX_BASE_AGE:
        return "stale base", f"a base may be {_MAX_BASE_AGE} versions old; {e.base_version} against {version}"
    if duplicate:
        return "duplicate base", f"a contribution from version {e.base_version} was already taken"
    if e.c_steps < 1 or e.c_tokens < 1:
        return "no progress", f"c_steps and c_tokens must be at least 1; got {e.c_steps} and {e.c_tokens}"
    # the board was read before the payload: the learner has gone on since
    most = m.num_steps + _most_steps(m, now)
    if e.c_steps > most or e.c_tokens > (e.c_steps + 1) * max_tokens_per_step:
        return "nonsense counters", f"{e.c_steps} steps, {e.c_tokens} tokens after {m.num_steps} steps in all"
    return None


def is_duplicate(m: LearnerRecord, e: ContributionArrived) -> bool:
    """Rule 4, once per base: pushing again before the receipt would count the same progress twice."""
    return e.base_version <= m.used_base.get(e.fragment, -1)


def _most_steps(m: LearnerRecord, now: float) -> float:
    """Inner steps that a learner can have made since its last report, at the very most."""
    return _BURST_STEPS + _MAX_STEPS_PER_S * (now - m.last_progress_s)
