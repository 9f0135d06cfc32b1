"""The syncer's protocol of Decoupled DiLoCo as a machine: events with a time in, actions with a reason out.

Here: every decision about rounds, quorum, grace window, weights, drain and end (paper, syncer; eq. 3), in one file
since they are read together. Not here: clocks, random numbers, I/O, tensors; what may be refused (admission.py). The
MPI syncer, the simulator and a replay drive this one object. Standard library only.

    for action in protocol.handle(event, now): ...     # now: seconds on one monotonic clock
    protocol.next_deadline()                           # when to send Tick() at the latest

A round lives through three phases:

    asking      on every board; learners announce at a step boundary. Ends K announcements plus the grace window later.
    collecting  off the boards; the payloads of those who announced are waited for, each for a bounded time.
    merging     handed to the driver; ends with MergeDone.

Rule numbers in comments are those of docs/architecture.md, "Rules of the protocol".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

from ..errors import ProtocolError
from .admission import contribution_refusal, is_duplicate, progress_refusal
from .events import (
    Action,
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
)
from .ledger import LearnerRecord, TokenLedger, average
from .rounds import FragmentRecord, ProtocolConfig, Round

__all__ = ["Protocol", "ProtocolConfig"]

_TRANSFER_PATIENCE = 3.0  # times a learner's own average transfer
_FIRST_TRANSFER_S = 10.0  # patience before anybody's transfer has been seen
_LONGEST_TRANSFER_S = 120.0  # what payloads that never came may raise an average to
_MIN_PATIENCE_S = 0.1  # a transfer that fell into one poll was measured as 0 s
_BOUNDARY_SHARE = 1.1  # a pulled learner needs up to one step to reach a boundary
_LATE_AFTER_MISSES = 2  # rule 3: late twice running ...
_WAIT_EVERY_ROUNDS = 4  # ... is waited for once every 4th round ...
_WAIT_BOUND_STEPS = 4.0  # ... for at most 4 xi_step


class Protocol:
    """The machine. Not thread-safe: one thread drives it.

    Attributes:
        step: the syncer's clock t.
        processed_tokens: of all learners and incarnations.
        stop_step, stop_reason: the clock step at which learners end, or None; and why.
        phase: running, draining or finished.
        rejected: rejections by kind.
        ignored: events of other incarnations or unknown learners, and repetitions, by event name.
        num_merges: merges published.
    """

    def __init__(self, config: ProtocolConfig) -> None:
        self.config = config
        self.step = 0
        self.processed_tokens = 0
        self.stop_step: int | None = None
        self.stop_reason = ""
        self.phase = "running"
        self.learners: dict[int, LearnerRecord] = {}
        self.past_ledgers: dict[int, TokenLedger] = {}
        self.fragments = [FragmentRecord() for _ in range(config.num_fragments)]
        self.rounds: dict[int, Round] = {}
        self.rejected: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.num_merges = 0
        self.merge_gap_steps = 0  # sum over merges of the clock steps since the fragment's previous merge
        self.num_merge_gaps = 0
        self.xi_quorum_s: float | None = None
        self.xi_sync_s: float | None = None
        self._next_round = 1
        self._now_s = 0.0
        self._drain_end_s: float | None = None
        self._checkpoint_s: float | None = None  # when the last was due, at first when the first learner joined
        self._out: list[Action] = []

    # ---------------------------------------------------------------------------------------------- the two verbs

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event and return what is to be done, in order.

        Args:
            event: one of core/events.py.
            now: seconds on the driver's monotonic clock, never smaller than before.

        Raises:
            ProtocolError: if the driver breaks the contract (an unknown event, MergeDone of no merge).
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ProtocolError(f"handle() takes an event of pyddl.core.events; got {event!r}")
        if self.phase == "finished":
            self.ignored["after the end"] += 1
            return ()
        self._now_s = now
        handler(self, event, now)
        self._advance(now)
        out, self._out = tuple(self._out), []
        return out

    def next_deadline(self) -> float | None:
        """When :class:`Tick` is due at the latest, in seconds of the driver's clock; None: nothing waits for time."""
        times = [] if self._drain_end_s is None else [self._drain_end_s]
        for r in self.rounds.values():
            if r.phase == "asking" and (r.drain or r.grace_end_s is not None):
                times.append(self._asking_end(r))
            elif r.phase == "collecting":
                times.extend(self._payload_deadline(r, m) for m in r.awaited())
        if self.phase == "running":
            since = [m.silent_since_s for m in self.learners.values() if m.state != "lost"]
            ends = [s + self.config.give_up_s for s in since if s is not None]
            times.extend(end for end in ends if end > self._now_s)
        return min(times) if times else None

    # --------------------------------------------------------------------------------------------------- learners

    def _joined(self, e: LearnerJoined, now: float) -> None:
        old = self.learners.get(e.learner_id)
        if old is not None:
            if e.incarnation <= old.incarnation:
                self.ignored["LearnerJoined"] += 1
                return
            if old.state != "lost":
                self._lose(old, "a newer incarnation joined")
            self._bury(old)
            for r in self.rounds.values():
                if e.learner_id not in r.arrived:
                    r.forget(e.learner_id)
        if self._checkpoint_s is None:
            self._checkpoint_s = now
        # Counters of a newcomer start at zero and its step is the syncer's (paper, recovery).
        self.learners[e.learner_id] = LearnerRecord(
            e.learner_id, e.incarnation, joined_s=now, step=self.step, last_progress_s=now
        )
        if self.stop_step is None and self.config.max_steps:
            self._stop_at(self.config.max_steps, f"max_steps = {self.config.max_steps}")

    def _progress(self, e: Progress, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is None:
            return
        reason = self._nonsense(m, e, now)
        if reason:
            self.rejected["nonsense progress"] += 1
            self._out.append(Reject(e.learner_id, e.incarnation, 0, "nonsense progress", reason))
            return
        m.silent_since_s = None
        m.take_progress(now, e.step, e.num_steps, e.tokens, clip=self._step_clip())

    def _nonsense(self, m: LearnerRecord, e: Progress, now: float) -> str | None:
        limit = self.config.max_tokens_per_step
        return progress_refusal(m, e, now, clock=self.step, max_tokens_per_step=limit)

    def _silent(self, e: LearnerSilent, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is not None:
            m.silent_since_s = now if m.silent_since_s is None else m.silent_since_s

    def _lost(self, e: LearnerLost, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is not None:
            self._lose(m, e.reason)

    def _lose(self, m: LearnerRecord, reason: str) -> None:
        m.state = "lost"
        for r in self.rounds.values():
            if r.phase in ("asking", "collecting") and m.learner_id in r.announced and m.learner_id not in r.arrived:
                r.dropped.add(m.learner_id)

    def _done(self, e: LearnerDone, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is not None and m.state == "training":
            m.state, m.finished = "closing", True

    def _known(self, learner_id: int, incarnation: int, event: Event) -> LearnerRecord | None:
        """The record, unless the event is of another incarnation or of one already lost: then it is counted."""
        m = self.learners.get(learner_id)
        if m is None or m.incarnation != incarnation or m.state == "lost":
            self.ignored[type(event).__name__] += 1
            return None
        return m

    def _bury(self, m: LearnerRecord) -> None:
        self.past_ledgers.setdefault(m.learner_id, TokenLedger()).add(m.tokens)

    def _stop_requested(self, e: StopRequested, now: float) -> None:
        self._stop_at(self.step, e.reason)

    def _stop_at(self, step: int, reason: str) -> None:
        if self.stop_step is None or step < self.stop_step:
            self.stop_step, self.stop_reason = step, reason
            self._out.append(StopAt(step, reason))

    def _tick(self, e: Tick, now: float) -> None:
        pass

    # ---------------------------------------------------------------------------------------------- contributions

    def _announced(self, e: Announced, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is None:
            return
        r = self.rounds.get(e.round)
        asking = r is not None and r.phase == "asking"
        earlier = r.arrived.get(m.learner_id) if r is not None else None
        if e.declined:
            if r is not None and asking and m.learner_id not in r.announced:
                r.declined.add(m.learner_id)
            return
        is_mine = earlier is not None and earlier.incarnation == m.incarnation
        if r is not None and asking and not is_mine and m.answered.pop(r.id, "none") != "none":
            r.dropped.discard(m.learner_id)  # its first answer was refused and it was told so: this is another
            if earlier is None:
                r.announced.pop(m.learner_id, None)
        if e.round in m.answered or is_mine:
            self.ignored["Announced"] += 1  # the payload was seen before the announcement
        elif earlier is not None:
            self._reject(m, e.round, "twice", "an earlier incarnation's contribution is in this round", now)
        elif r is not None and asking:
            r.declined.discard(m.learner_id)
            r.announced.setdefault(m.learner_id, now)
        elif r is not None and m.learner_id in r.announced:
            self.ignored["Announced"] += 1
        else:
            if r is not None:
                r.dropped.add(m.learner_id)  # it is told `not merged`: its payload must not slip in later
            self._reject(m, e.round, "late", f"round {e.round} is closed", now)

    def _arrived(self, e: ContributionArrived, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is None:
            return
        r = self.rounds.get(e.round)
        earlier = r.arrived.get(m.learner_id) if r is not None else None
        if earlier is not None and earlier.incarnation == m.incarnation:
            self.ignored["ContributionArrived"] += 1  # its answer comes with the round
            return
        m.tokens.proposed += max(0, e.c_tokens)
        if e.round in m.answered:
            # Too late, and told so already; now its duration is known.
            m.tokens.discarded += max(0, e.c_tokens)
            if m.answered[e.round] is not None:
                self._note_transfer(m, now - (m.answered[e.round] or 0.0))
                m.answered[e.round] = None
            return
        open_round = r if r is not None and r.phase in ("asking", "collecting") else None
        refusal = self._refusal(m, open_round, e, now)
        if refusal or open_round is None:
            m.tokens.discarded += max(0, e.c_tokens)
            if r is not None and m.learner_id not in r.arrived:
                r.announced.setdefault(m.learner_id, now)
                r.dropped.add(m.learner_id)
            self._reject(m, e.round, *(refusal or ("late", f"round {e.round} is closed")))
            return
        self._note_transfer(m, now - open_round.announced.setdefault(m.learner_id, now))
        open_round.declined.discard(m.learner_id)
        m.used_base[e.fragment] = e.base_version
        open_round.arrived[m.learner_id] = e

    def _note_transfer(self, m: LearnerRecord, duration_s: float) -> None:
        patience_s = None if m.transfer_s is None else max(_MIN_PATIENCE_S, _TRANSFER_PATIENCE * m.transfer_s)
        m.transfer_s = average(m.transfer_s, duration_s, ceiling=patience_s)

    def _refusal(self, m: LearnerRecord, r: Round | None, e: ContributionArrived, now: float) -> tuple[str, str] | None:
        return contribution_refusal(
            m,
            r,
            e,
            now,
            version=0 if r is None else self.fragments[r.fragment].version,
            duplicate=self._is_duplicate(m, e),
            max_tokens_per_step=self.config.max_tokens_per_step,
        )

    def _is_duplicate(self, m: LearnerRecord, e: ContributionArrived) -> bool:
        return is_duplicate(m, e)

    def _damaged(self, e: ContributionDamaged, now: float) -> None:
        m = self._known(e.learner_id, e.incarnation, e)
        if m is None:
            return
        r = self.rounds.get(e.round)
        earlier = r.arrived.get(m.learner_id) if r is not None else None
        if e.round in m.answered or (earlier is not None and earlier.incarnation == m.incarnation):
            self.ignored["ContributionDamaged"] += 1
            return
        if r is not None and earlier is None:
            r.announced.setdefault(m.learner_id, now)
            r.dropped.add(m.learner_id)
        self._reject(m, e.round, "damaged", e.reason)

    def _reject(
        self, m: LearnerRecord, round_id: int, kind: str, reason: str, announced_s: float | None = None
    ) -> None:
        """The one answer to a contribution; ``announced_s`` if its payload is still on its way."""
        self.rejected[kind] += 1
        if round_id < self._next_round:
            m.note_answer(round_id, announced_s)
        self._out.append(Reject(m.learner_id, m.incarnation, round_id, kind, reason))

    def _return(self, r: Round, learner_id: int, kind: str, reason: str) -> None:
        """Give a contribution that was taken back as not merged: its base may be used again."""
        m, e = self.learners[learner_id], r.arrived.pop(learner_id, None)
        r.dropped.add(learner_id)
        if e is not None:
            self._ledger_of(e).discarded += e.c_tokens
            if m.incarnation != e.incarnation:
                return  # nobody is left to be told
            if m.used_base.get(r.fragment) == e.base_version:
                m.used_base[r.fragment] = e.base_version - 1
        self._reject(m, r.id, kind, reason, r.announced.get(learner_id) if e is None else None)

    def _merge_done(self, e: MergeDone, now: float) -> None:
        r = self.rounds.get(e.round)
        if r is None or r.merge is None:
            raise ProtocolError(f"MergeDone must name a round that is merging; got round {e.round}")
        del self.rounds[r.id]
        fragment = self.fragments[r.fragment]
        for learner_id, reason in e.rejected:
            self._return(r, learner_id, "not finite", reason)
        fragment.drained = fragment.drained or r.drain
        if not r.arrived:
            fragment.last_open = r.previous_open
            return
        merged = []  # a successor must not take its forerunner's contribution for its own
        for learner_id, arrival in sorted(r.arrived.items()):
            self._ledger_of(arrival).effective += arrival.c_tokens
            m = self.learners[learner_id]
            if m.incarnation == arrival.incarnation:
                m.num_merged += 1
                m.note_answer(r.id, None)
                merged.append(learner_id)
        assert r.closed_s is not None
        self.xi_sync_s = average(self.xi_sync_s, now - r.closed_s, ceiling=self._clip_s())
        fragment.version = r.merge.version
        if fragment.last_merge is not None:
            self.merge_gap_steps += self.step - fragment.last_merge
            self.num_merge_gaps += 1
        fragment.last_merge = self.step
        self.num_merges += 1
        self._out.append(
            Publish(
                r.id,
                r.fragment,
                r.merge.version,
                tuple(merged),
                self.step,
                f"merged {len(r.arrived)} learners",
            )
        )
        if self._is_checkpoint_due(now):
            self._checkpoint_s = now
            self._out.append(Checkpoint(self.step, f"merge {self.num_merges}"))

    def _is_checkpoint_due(self, now: float) -> bool:
        """Called with each merge: nothing that would be worth keeping comes between two."""
        every, every_s = self.config.checkpoint_every_merges, self.config.checkpoint_every_s
        if every and self.num_merges % every == 0:
            return True
        if not every_s or self._checkpoint_s is None or self.phase != "running":  # the end writes one anyway
            return False
        return now - self._checkpoint_s >= every_s

    def _ledger_of(self, e: ContributionArrived) -> TokenLedger:
        m = self.learners.get(e.learner_id)
        if m is not None and m.incarnation == e.incarnation:
            return m.tokens
        return self.past_ledgers.setdefault(e.learner_id, TokenLedger())

    # --------------------------------------------------------------------------------------------------- advancing

    def _advance(self, now: float) -> None:
        self._advance_clock(now)
        if self.phase == "running" and self._live_count() < self._quorum():
            self._cancel_asking(now)
        for r in list(self.rounds.values()):
            if r.phase == "asking":
                self._advance_asking(r, now)
            if r.phase == "collecting":
                self._advance_collecting(r, now)
        self._open_due(now)
        if self.phase == "draining":
            self._finish_if_drained(now)
        elif self._nobody_is_left(now) and not self.rounds:
            self._out.append(Checkpoint(self.step, "no learner is left"))
            self._finish("no learner is left")

    def _is_gone(self, m: LearnerRecord, now: float) -> bool:
        """Whether the end of the run waits for it no more. On another host silence is all that is seen of a death."""
        silent = m.silent_since_s is not None and now - m.silent_since_s >= self.config.give_up_s
        return m.state == "lost" or silent

    def _nobody_is_left(self, now: float) -> bool:
        gone = sum(self._is_gone(m, now) for m in self.learners.values())
        return 0 < gone == len(self.learners) >= self.config.num_learners

    def _advance_clock(self, now: float) -> None:
        """Rule 1: t is the largest step that K live learners have reached; it never falls."""
        steps = sorted((m.step for m in self.learners.values() if m.is_live), reverse=True)
        quorum = self._quorum()
        if len(steps) >= quorum > 0:
            self.step = max(self.step, steps[quorum - 1])
        self.processed_tokens = sum(m.tokens.processed for m in self.learners.values())
        self.processed_tokens += sum(ledger.processed for ledger in self.past_ledgers.values())
        if self.phase != "running":
            return
        if self.config.max_tokens and self.processed_tokens >= self.config.max_tokens:
            self._stop_at(self.step, f"max_tokens = {self.config.max_tokens}")
        present = [m for m in self.learners.values() if not self._is_gone(m, now)]
        everybody = present and len(self.learners) >= self.config.num_learners
        if everybody and all(m.state == "closing" for m in present):
            self._stop_at(self.step, "all learners are done")
        if self.stop_step is not None and self.step >= self.stop_step:
            self._begin_drain(now)

    def _begin_drain(self, now: float) -> None:
        """Rule 7. Every fragment gets a round of its own after the last step, so what is open now does not count."""
        self.phase = "draining"
        self._drain_end_s = now + self.config.drain_s
        for r in [r for r in self.rounds.values() if r.phase == "asking"]:
            if r.announced:
                self._close(r, now, "the drain begins")
            else:
                self._cancel(r, "too few learners", "the drain begins")

    def _quorum(self) -> int:
        """K_eff: K, but not more than there are learners that have not finished (rule 6)."""
        if self.phase == "draining":
            return 1
        if self.step < self.config.lockstep_steps:
            return max(1, self._live_count())
        finished = sum(m.finished for m in self.learners.values())
        unfinished = max(self.config.num_learners, len(self.learners)) - finished
        return max(1, min(self.config.quorum, unfinished))

    def _live_count(self) -> int:
        return sum(m.is_live for m in self.learners.values())

    def due_step(self, fragment: int) -> int:
        """The clock step at which the fragment's next round is due under the present H (rule 1).

        The first step t with t mod H = t_p, t_p = floor(p * H / P), that lies at least H/2 after its last round, so
        that a stall is followed by one round and not by one for every step missed. First at H + t_p.
        """
        interval = self.config.interval.at(self._position())
        phase = fragment * interval // self.config.num_fragments
        last = self.fragments[fragment].last_open
        if last is None:
            return interval + phase
        return phase + interval * math.ceil((last + self._min_gap(interval) - phase) / interval)

    def _position(self) -> int:
        """Where in the schedule of H the run is."""
        return self.config.interval.position(self.step, self.processed_tokens, self.config.max_tokens)

    def _min_gap(self, interval: int) -> int:
        return (interval + 1) // 2

    def _open_due(self, now: float) -> None:
        if self.phase == "running" and self._live_count() < self._quorum():
            return
        if self.phase == "draining" and not any(m.can_answer for m in self.learners.values()):
            return
        busy = {r.fragment for r in self.rounds.values()}
        idle = [p for p in range(self.config.num_fragments) if p not in busy]
        if self.phase == "draining":
            due = [p for p in idle if not self.fragments[p].drained]
        else:
            due = sorted((p for p in idle if self.due_step(p) <= self.step), key=lambda p: (self.due_step(p), p))
        for p in due[: max(0, self.config.in_flight_at(self._position()) - len(self.rounds))]:
            self._open(p, now)

    def _open(self, p: int, now: float) -> None:
        fragment, drain = self.fragments[p], self.phase == "draining"
        reason = "drain" if drain else f"due at {self.due_step(p)}"
        r = Round(self._next_round, p, fragment.version, now, self.step, fragment.last_open, drain)
        self._next_round += 1
        self.rounds[r.id] = r
        fragment.last_open = self.step
        self._out.append(OpenRound(r.id, p, fragment.version, drain, reason))

    # -- asking

    def _advance_asking(self, r: Round, now: float) -> None:
        answered = set(r.announced) | r.declined
        waiting = [m.learner_id for m in self._askable(r) if m.learner_id not in answered]
        if r.drain:
            if not waiting or now >= self._asking_end(r):
                self._close(r, now, "all have answered" if not waiting else "drain timeout")
            return
        if r.grace_end_s is None:
            if self.quorum_count(r) < self._quorum():
                if r.dropped and not waiting:  # nobody else will come, so the quorum never would
                    self._cancel(r, "too few learners", "all have answered, too many were refused")
                return
            xi = now - r.opened_s
            self.xi_quorum_s = average(self.xi_quorum_s, xi, ceiling=self._clip_s())
            r.grace_end_s = now + self.grace_window_s()
            r.waited_for = frozenset(m for m in waiting if self.must_wait_for(self.learners[m], r.fragment))
            r.wait_end_s = now + _WAIT_BOUND_STEPS * (self.xi_step_s() or 0.0)
        if not waiting:
            self._close(r, now, "all live learners have answered")
        elif now >= self._asking_end(r):
            missing = ", ".join(map(str, waiting))
            self._close(r, now, f"quorum and grace window, without learner {missing}")

    def _askable(self, r: Round) -> list[LearnerRecord]:
        return [m for m in self.learners.values() if (m.can_answer if r.drain else m.is_live)]

    def quorum_count(self, r: Round) -> int:
        """Rule 2: what counts towards K are announcements, not arrivals, of learners that live."""
        return sum(1 for m in r.announced if m not in r.dropped and self.learners[m].can_answer)

    def _asking_end(self, r: Round) -> float:
        if r.drain:
            # Half of the time for whoever has yet to reach close(), the rest in equal shares: one learner that never
            # answers must not keep the other fragments from being drained.
            assert self._drain_end_s is not None
            left = sum(not f.drained for f in self.fragments)
            turns = math.ceil(left / self.config.in_flight_at(self._position()))
            share_s = max(0.0, self._drain_end_s - r.opened_s) / (turns + 1)
            return min(self._drain_end_s, max(self._drain_end_s - self.config.drain_s / 2, r.opened_s + share_s))
        assert r.grace_end_s is not None
        assert r.wait_end_s is not None
        late = [m for m in r.waited_for if m not in r.announced and self.learners[m].is_live]
        return max(r.grace_end_s, r.wait_end_s) if late else r.grace_end_s

    def xi_step_s(self) -> float | None:
        """xi_step: the step time of the K-th fastest live learner, the one that sets the clock (rule 3)."""
        times = sorted(m.step_s for m in self.learners.values() if m.is_live and m.step_s is not None)
        return times[min(self._quorum(), len(times)) - 1] if times else None

    def grace_window_s(self) -> float:
        """Eq. 3: gamma * (tau * xi_step - xi_quorum - xi_sync), and long enough to reach one step boundary."""
        if not self.config.grace:
            return 0.0
        xi_step = self.xi_step_s()
        if xi_step is None:
            return 0.0
        slack = self.config.tau_steps * xi_step - (self.xi_quorum_s or 0.0) - (self.xi_sync_s or 0.0)
        return max(self.config.gamma * slack, self.grace_floor_s(xi_step), 0.0)

    def grace_floor_s(self, xi_step: float) -> float:
        """Rule 3: a pulled learner needs up to one step to reach a boundary at all."""
        return _BOUNDARY_SHARE * xi_step

    def must_wait_for(self, m: LearnerRecord, fragment: int) -> bool:
        """Rule 3: who was late twice running is waited for once every 4th round, or resonance shuts it out."""
        misses = m.misses.get(fragment, 0)
        if not self.config.grace or misses < _LATE_AFTER_MISSES or (misses + 1) % _WAIT_EVERY_ROUNDS:
            return False
        # One too slow to reach a boundary in that time would only slow down the others.
        bound_s = _WAIT_BOUND_STEPS * (self.xi_step_s() or 0.0)
        return m.step_s is None or m.step_s <= bound_s

    def _step_clip(self) -> float:
        """Rule 3: a step counts as at most so many times the learner's average."""
        return float(self.config.tau_steps)

    def _clip_s(self) -> float | None:
        """Rule 3: a sample of xi_quorum or xi_sync counts as at most tau * xi_step."""
        xi_step = self.xi_step_s()
        return None if xi_step is None else self.config.tau_steps * xi_step

    # -- collecting

    def _close(self, r: Round, now: float, reason: str) -> None:
        r.phase, r.closed_s = "collecting", now
        self._out.append(CloseRound(r.id, r.fragment, reason))

    def _payload_deadline(self, r: Round, learner_id: int) -> float:
        """Each announced payload is waited for at most 3x that learner's own average transfer (rule 2)."""
        own = self.learners[learner_id].transfer_s
        if own is None:
            known = [m.transfer_s for m in self.learners.values() if m.transfer_s is not None]
            own = max(known, default=_FIRST_TRANSFER_S)  # too short for it: its late arrival will tell
        patience_s = max(_MIN_PATIENCE_S, _TRANSFER_PATIENCE * own)
        end = max(r.announced[learner_id], r.closed_s or 0.0) + patience_s
        if self._drain_end_s is not None:
            end = min(end, self._drain_end_s)
        return end

    def _advance_collecting(self, r: Round, now: float) -> None:
        for learner_id in r.awaited():
            m = self.learners[learner_id]
            if not m.can_answer:
                self._return(r, learner_id, "late", f"it fell silent before its payload for round {r.id} came")
            elif now >= self._payload_deadline(r, learner_id):
                # It takes at least as long as this: were that not counted, a link that became slow would be late for
                # ever.
                at_least_s = min(now - r.announced[learner_id], _LONGEST_TRANSFER_S)
                self._note_transfer(m, max(at_least_s, m.transfer_s or 0.0))
                self._return(r, learner_id, "late", f"its payload for round {r.id} did not come in time")
        if r.awaited():
            return
        contributors = tuple(self._contributor(r.arrived[m]) for m in sorted(r.arrived))
        fragment = self.fragments[r.fragment]
        self._note_misses(r)
        if not contributors:
            del self.rounds[r.id]
            fragment.drained = fragment.drained or r.drain
            if not r.drain:
                fragment.last_open = r.previous_open
            return
        fragment.last_version += 1
        for e in r.arrived.values():
            self._ledger_of(e).selected += e.c_tokens
        names = ", ".join(str(c.learner_id) for c in contributors)
        r.phase = "merging"
        r.merge = Merge(r.id, r.fragment, r.base_version, fragment.last_version, contributors, f"learners {names}")
        self._out.append(r.merge)

    def _contributor(self, e: ContributionArrived) -> Contributor:
        weight = e.c_tokens * (e.c_tokens / e.c_steps)  # quantity x quality (paper, syncer)
        return Contributor(e.learner_id, e.incarnation, weight, e.base_version, e.step, e.c_steps, e.c_tokens)

    def _note_misses(self, r: Round) -> None:
        for m in self._askable(r):
            if m.learner_id in r.arrived or m.learner_id in r.declined:
                m.misses[r.fragment] = 0
            else:
                m.misses[r.fragment] = m.misses.get(r.fragment, 0) + 1

    def _cancel_asking(self, now: float) -> None:
        """Rule 6: too few learners; what was asked is taken back and asked anew later."""
        reason = f"{self._live_count()} of {self._quorum()} learners are live"
        for r in [r for r in self.rounds.values() if r.phase == "asking"]:
            self._cancel(r, "too few learners", reason)

    def _cancel(self, r: Round, kind: str, reason: str) -> None:
        """End a round without a merge; whoever has answered is told so."""
        if r.phase == "asking":
            self._out.append(CloseRound(r.id, r.fragment, reason))
        for learner_id in sorted(r.announced):
            if learner_id not in r.dropped:
                self._return(r, learner_id, kind, reason)
        self.fragments[r.fragment].last_open = r.previous_open
        del self.rounds[r.id]

    # -- the end

    def _finish_if_drained(self, now: float) -> None:
        merging = any(r.phase == "merging" for r in self.rounds.values())
        if all(f.drained for f in self.fragments) and not self.rounds:
            reason = "drained"
        elif self._drain_end_s is not None and now >= self._drain_end_s and not merging:
            reason = "drain timeout"
        elif not any(m.can_answer for m in self.learners.values()) and not merging:
            reason = "no learner is left to drain"
        else:
            return
        self._out.append(Checkpoint(self.step, reason))
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        for r in list(self.rounds.values()):
            self._cancel(r, "late", reason)
        self.phase = "finished"
        self._drain_end_s = None
        self._out.append(Finish(reason))

    # ------------------------------------------------------------------------------------------- looking from outside

    def status(self) -> str:
        """What the syncer waits for, as a sentence that changes only when its cause does (for the log)."""
        if self.phase != "running":
            return self.phase
        live, quorum = self._live_count(), self._quorum()
        if live < quorum:
            missing = [
                m for m in range(self.config.num_learners) if m not in self.learners or not self.learners[m].is_live
            ]
            return f"{live} of the {quorum} learners of the quorum are live; missing: {', '.join(map(str, missing))}"
        return "running"

    def limit_step(self) -> int | None:
        """Lock-step start: learners wait before they make a step beyond this one; None: they never wait."""
        if self.phase != "running" or self.step >= self.config.lockstep_steps:
            return None
        due = any(self.due_step(p) <= self.step for p in range(self.config.num_fragments))
        return self.step if due or self.rounds else self.step + 1

    def achieved_interval_steps(self) -> float | None:
        """Mean number of clock steps between two merges of a fragment: the H that was really achieved."""
        return self.merge_gap_steps / self.num_merge_gaps if self.num_merge_gaps else None

    def tokens(self) -> TokenLedger:
        """The token ledger of the whole run, over all learners and incarnations."""
        total = TokenLedger()
        for ledger in [*self.past_ledgers.values(), *(m.tokens for m in self.learners.values())]:
            total.add(ledger)
        return total

    def snapshot(self) -> dict[str, Any]:
        """What must outlive the syncer, JSON-able; open rounds are not part of it, learners join again."""
        ledgers = {m: replace(t) for m, t in self.past_ledgers.items()}
        for m in self.learners.values():
            ledgers.setdefault(m.learner_id, TokenLedger()).add(m.tokens)
        for r in self.rounds.values():
            for e in r.arrived.values():  # what an open round holds is not merged by whoever restores this
                ledgers[e.learner_id].discarded += e.c_tokens
        return {
            "step": self.step,
            "next_round": self._next_round,
            "num_merges": self.num_merges,
            "merge_gap_steps": self.merge_gap_steps,
            "num_merge_gaps": self.num_merge_gaps,
            "xi_quorum_s": self.xi_quorum_s,
            "xi_sync_s": self.xi_sync_s,
            "rejected": dict(self.rejected),
            "ignored": dict(self.ignored),
            "ledgers": {str(m): asdict(t) for m, t in ledgers.items()},
            "fragments": [[f.version, f.last_version, f.last_open, f.last_merge] for f in self.fragments],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`snapshot`'s result; only before the first event.

        Raises:
            ProtocolError: if events were handled already, or P differs.
        """
        if self.learners or self._next_round != 1:
            raise ProtocolError("restore() must come before the first event; this protocol is in use")
        if len(state["fragments"]) != self.config.num_fragments:
            raise ProtocolError(f"restore() needs {self.config.num_fragments} fragments; got {len(state['fragments'])}")
        self.step = state["step"]
        self._next_round = state["next_round"]
        self.num_merges = state["num_merges"]
        self.merge_gap_steps, self.num_merge_gaps = state["merge_gap_steps"], state["num_merge_gaps"]
        self.xi_quorum_s, self.xi_sync_s = state["xi_quorum_s"], state["xi_sync_s"]
        self.rejected, self.ignored = Counter(state["rejected"]), Counter(state["ignored"])
        self.past_ledgers = {int(m): TokenLedger(**t) for m, t in state["ledgers"].items()}
        for f, (version, last_version, last_open, last_merge) in zip(self.fragments, state["fragments"], strict=True):
            f.version, f.last_version, f.last_open, f.last_merge = (
                version,
                last_version,
                last_open,
                last_merge,
            )

    def check(self) -> None:
        """Assert the invariants that must hold between any two events (for tests)."""
        fragments = [r.fragment for r in self.rounds.values()]
        assert len(set(fragments)) == len(fragments), "two open rounds of one fragment"
        assert all(r.id < self._next_round for r in self.rounds.values())
        pending = sum(e.c_tokens for r in self.rounds.values() for e in r.arrived.values())
        total = self.tokens()
        assert total.proposed == total.effective + total.discarded + pending, (total, pending)
        assert total.selected >= total.effective
        for f in self.fragments:
            assert f.version <= f.last_version
        for r in self.rounds.values():
            assert (r.phase == "merging") == (r.merge is not None)
            assert not set(r.arrived) & r.dropped
        assert self._drain_end_s is None or self.phase == "draining"

    _handlers: ClassVar[dict[type[Event], Callable[[Protocol, Any, float], None]]] = {
        LearnerJoined: _joined,
        Progress: _progress,
        Announced: _announced,
        ContributionArrived: _arrived,
        ContributionDamaged: _damaged,
        LearnerSilent: _silent,
        LearnerLost: _lost,
        LearnerDone: _done,
        MergeDone: _merge_done,
        StopRequested: _stop_requested,
        Tick: _tick,
    }
