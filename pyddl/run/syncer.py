"""The syncer's loop: it reads mailboxes, tells the protocol, and does what the protocol says.

Here: turning words into events and actions into stores, merges, checkpoints and trace lines. Not here: decisions
(core/protocol.py), MPI (link/world.py), the set-up of a world (run/serving.py). Nothing here needs torch.

Three threads beside the main one, all with the GIL released in what takes long: one merges, one verifies contributions
and copies published fragments, one writes checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from typing import Protocol as Interface

from ..config import Config, to_toml
from ..core import events as ev
from ..core.kernels import OuterStep
from ..core.layout import Layout
from ..core.protocol import Protocol, ProtocolConfig
from ..core.state import GlobalState, Input, StepResult
from ..errors import TransportError
from ..link.mailbox import (
    CLOSING,
    DRAINING,
    FINISHED,
    FINISHED_AFTER_LOSS,
    FINISHED_WITHOUT,
    LEFT,
    MERGED,
    NOT_MERGED,
    RUNNING,
    pack,
)
from ..link.port import Contribution, LearnerPort, Published, Reading
from ..store.background import BackgroundTrace
from ..store.checkpoint import Checkpoint, FragmentState
from .processes import DeathWatch
from .saving import Saver

__all__ = ["Syncer", "View", "new_global_state", "protocol_config"]

log = logging.getLogger(__name__)

_POLL_S = 0.001
_BEAT_S = 0.01
_SAMPLE_S = 1.0  # between two lines of progress in the trace
_ORDINARY_CAUSES = frozenset(("late", "too few learners"))  # of refusals: part of every run with slow learners
_LOOK_AGAIN_S = (0.01, 0.1)  # naps before a contribution is called damaged
_LINGER_S = 0.3  # after everybody has left
_LEAVE_S = 10.0  # for the learners to take the last fragments and go


def protocol_config(config: Config, layout: Layout, num_learners: int) -> ProtocolConfig:
    """What the protocol has to know, from a run's configuration."""
    return ProtocolConfig(
        num_fragments=len(layout.fragments),
        num_learners=num_learners,
        quorum=config.sync.quorum,
        interval=config.interval,
        tau_steps=config.sync.tau_steps,
        in_flight=config.sync.in_flight,
        gamma=config.sync.gamma,
        grace=config.sync.grace,
        max_steps=config.run.max_steps,
        max_tokens=config.run.max_tokens,
        drain_s=config.timeouts.drain_s,
        give_up_s=config.timeouts.syncer_s,
        checkpoint_every_merges=config.run.checkpoint_every_merges,
        checkpoint_every_s=config.run.checkpoint_every_s,
        lockstep_steps=config.sync.lockstep_steps,
    )


def new_global_state(config: Config, layout: Layout) -> GlobalState:
    """An empty global state for a run's configuration."""
    outer = OuterStep(config.outer.optimizer, config.outer.lr, config.outer.momentum)  # type: ignore[arg-type]
    return GlobalState(
        layout,
        outer=outer,
        merge_rule=config.sync.merge_rule,
        wire=config.sync.wire,
        backend=config.run.backend,
    )


def _verify(port: LearnerPort, line: int, round_id: int) -> Contribution:
    """Check a contribution; over a transport that does not keep its order the payload may come after its commit."""
    for nap_s in _LOOK_AGAIN_S:
        try:
            return port.verify(line, round_id)
        except TransportError:
            time.sleep(nap_s)
    return port.verify(line, round_id)


class View(Interface):
    """Shows the run to a person (view/progress.py)."""

    def update(self, syncer: Syncer) -> None:
        """Called often; draws when it is time to."""
        ...

    def say(self, sentence: str) -> None:
        """A change of state worth a line."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@dataclass
class _Learner:
    """A learner as the loop sees it."""

    port: LearnerPort
    watch: DeathWatch
    last_beat_s: float
    silent: bool = False
    lost: bool = False
    done: bool = False
    left: bool = False
    loss: float = float("nan")
    progress: tuple[int, int, int] = (0, 0, 0)
    moved_s: float = 0.0  # when it last made a step
    max_gap_s: float = 0.0  # longest time between two steps since the last sample
    verified: dict[int, Contribution] = field(default_factory=dict)  # round -> contribution
    undecided: dict[int, int] = field(default_factory=dict)  # round -> line on which it was answered
    causes_said: set[str] = field(default_factory=set)  # refusals that a person was told of


class Syncer:
    """The loop around one protocol object.

    Args:
        config: of the run.
        layout: parameters -> fragments.
        state: loaded with the present model.
        protocol: fresh, or restored from a checkpoint.
        ports: the mailboxes, by learner_id; each with a watch on the learner's processes.
        folder: of the run, or None: nothing is written.
        view: shows progress.
        set_busy: told whether something is in flight (drives MPI's progress faster).
        executor: runs verifications and downlink copies.
        refresh: shows now and then that the run's folder is in use.
        frozen: checksums of the model's frozen tensors by name, for the checkpoints.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        state: GlobalState,
        protocol: Protocol,
        ports: dict[int, tuple[LearnerPort, DeathWatch]],
        *,
        folder: Path | None,
        view: View,
        set_busy: Callable[[bool], None],
        executor: Executor,
        refresh: Callable[[], object] | None,
        frozen: dict[str, int],
    ) -> None:
        self.config = config
        self.layout = layout
        self.state = state
        self.protocol = protocol
        self.num_lost = 0
        self.after_loss = False  # what all learners were told at the end: nothing of MPI is to be freed
        self.num_in_last_merge = 0
        self.started_s = time.monotonic()
        self.outcome = ""
        self._view = view
        self._folder = folder
        self._set_busy = set_busy
        self._refresh = refresh
        self._frozen = frozen
        self._refreshed: Future[object] | None = None
        self._copier = executor
        self._merger = ThreadPoolExecutor(1, "pyddl-merge")
        self._refresher = ThreadPoolExecutor(1, "pyddl-lock")  # a long write must not let the lock go stale
        self._trace = BackgroundTrace(folder / "events.jsonl" if folder else None, fields={"role": "syncer"})
        now = time.monotonic()
        self.learners = {m: _Learner(port, watch, now, moved_s=now) for m, (port, watch) in sorted(ports.items())}
        num_slots = next(iter(self.learners.values())).port.geometry.num_slots
        self._free_lines = list(range(num_slots))
        self._lines: dict[int, int] = {}  # open round -> line
        self._ended_lines: dict[int, int] = {}  # the same of rounds that the last event has ended
        self._published: dict[int, Published] = {}
        self._steps = {p: protocol.step for p in range(len(layout.fragments))}
        self._merges: dict[int, Future[StepResult]] = {}
        self._verifications: list[tuple[_Learner, int, Future[Contribution]]] = []
        self.saver = Saver(folder, config.run.keep_checkpoints, self._trace, view.say)
        self._checkpoint_step: int | None = None  # learners save their state beside it
        self._beats = 0
        self._next_beat_s = 0.0
        self._next_sample_s = 0.0
        self._status = ""
        self._stop: str | None = None
        self._leaving = False
        # Where a death is survivable it may come in the last moment, too, when others wait for the dead in a
        # collective operation: then everybody leaves as after a loss, without one.
        self.ends_apart = False

    @property
    def num_silent(self) -> int:
        """Learners that do not beat at present."""
        return sum(x.silent and not x.lost for x in self.learners.values())

    @property
    def ended_well(self) -> bool:
        """Whether the run came to its end, did not just run out of learners, and its model is on disk if asked for."""
        return self.protocol.step > 0 and not self.outcome.startswith("no learner is left") and not self.saver.unsaved

    def learners_have_ended(self) -> bool:
        """Whether all processes of all learners are seen to have ended; never of those on other hosts."""
        return all(x.watch.all_ended() for x in self.learners.values())

    def request_stop(self, reason: str) -> None:
        """End the run in good order; safe to call from a signal handler."""
        self._stop = reason

    # ------------------------------------------------------------------------------------------------- the loop

    def serve(self) -> str:
        """Run until the protocol finishes; returns its reason."""
        now = time.monotonic()
        for m, learner in self.learners.items():
            self._tell(ev.LearnerJoined(m, learner.port.incarnation), now, processes=learner.watch.processes)
        while self.protocol.phase != "finished":
            self._turn()
        self._leave()
        return self.outcome

    def _turn(self) -> None:
        now = time.monotonic()
        if self._stop is not None:
            reason, self._stop = self._stop, None
            self._view.say(f"stopping: {reason}")
            self._tell(ev.StopRequested(reason), now)
        for m, learner in self.learners.items():
            if not learner.lost:
                self._look_at(m, learner, now)
        self._collect_verifications(now)
        self._collect_merges(now)
        deadline = self.protocol.next_deadline()
        if deadline is not None and now >= deadline:
            self._tell(ev.Tick(), now)
        self._pump(now)
        self._set_busy(bool(self.protocol.rounds) or any(not x.port.downlink.idle for x in self._present()))
        self._view.update(self)
        time.sleep(_POLL_S)

    def _present(self) -> list[_Learner]:
        return [learner for learner in self.learners.values() if not learner.lost]

    def _look_at(self, m: int, learner: _Learner, now: float) -> None:
        reading = learner.port.read()
        incarnation = learner.port.incarnation
        if reading is not None:
            self._take(m, learner, reading, now)
        if not learner.silent and now - learner.last_beat_s > self.config.timeouts.heartbeat_s:
            learner.silent = True
            self._view.say(f"learner {m} is silent; the others go on")
            self._tell(ev.LearnerSilent(m, incarnation), now)
        reason = learner.watch.ended()
        if reason is not None:
            learner.lost = True
            if not learner.left:
                self.num_lost += 1
                self._view.say(f"learner {m} is lost ({reason}); the others go on")
            self._tell(ev.LearnerLost(m, incarnation, "it left" if learner.left else reason), now)
        for fragment, version, seconds in learner.port.downlink.received:
            self._trace.write("Receipt", learner_id=m, fragment=fragment, version=version, after_s=seconds)
        learner.port.downlink.received.clear()

    def _take(self, m: int, learner: _Learner, reading: Reading, now: float) -> None:
        """Words to events. Progress first: a contribution is checked against it."""
        incarnation = learner.port.incarnation
        if reading.beating:
            learner.last_beat_s = now
        progress = (reading.step, reading.num_steps, reading.tokens)
        if learner.silent and reading.beating:  # every rank of it beats again: one that only steps is not whole
            learner.silent = False
            self._view.say(f"learner {m} is back")
            self._tell(ev.Progress(m, incarnation, *progress), now)
        if progress != learner.progress and not learner.silent:
            if progress[1] != learner.progress[1]:
                learner.max_gap_s = max(learner.max_gap_s, now - learner.moved_s)
                learner.moved_s = now
            learner.progress = progress
            learner.loss = reading.loss
            self._tell(ev.Progress(m, incarnation, *progress), now)
        if reading.state in (CLOSING, LEFT) and not learner.done:
            learner.done = True
            self._tell(ev.LearnerDone(m, incarnation), now)
        learner.left = learner.left or reading.state == LEFT
        for line, round_id, declined in reading.answers:
            if not declined:
                learner.undecided[round_id] = line
            self._tell(ev.Announced(m, incarnation, round_id, declined), now)
        for line, round_id in reading.commits:
            if round_id in learner.undecided:
                future = self._copier.submit(_verify, learner.port, line, round_id)
                self._verifications.append((learner, round_id, future))

    def _collect_verifications(self, now: float) -> None:
        waiting = []
        for learner, round_id, future in self._verifications:
            if not future.done():
                waiting.append((learner, round_id, future))
                continue
            if round_id not in learner.undecided:
                continue  # refused meanwhile: its slot may be in use again
            port = learner.port
            try:
                contribution = future.result()
            except TransportError as error:
                self._tell(ev.ContributionDamaged(port.learner_id, port.incarnation, round_id, str(error)), now)
                continue
            learner.verified[round_id] = contribution
            h = contribution.header
            self._tell(
                ev.ContributionArrived(
                    port.learner_id,
                    port.incarnation,
                    round_id,
                    h.fragment,
                    h.base_version,
                    h.step,
                    h.c_steps,
                    h.c_tokens,
                ),
                now,
            )
        self._verifications = waiting

    def _collect_merges(self, now: float) -> None:
        for round_id, future in list(self._merges.items()):
            if not future.done():
                continue
            del self._merges[round_id]
            try:
                result = future.result()
            except Exception as error:  # out of memory, say: that merge fails, the run goes on
                log.exception("the merge of round %d failed", round_id)
                inputs = self.protocol.rounds[round_id].arrived
                failed = tuple((m, f"the merge failed: {error}") for m in sorted(inputs))
                self._tell(ev.MergeDone(round_id, failed), now)
                continue
            self.state.commit(result)
            report = result.report
            norms = {} if report is None else {"norms": report.norms.tolist(), "merged_norm": report.merged_norm}
            self._tell(ev.MergeDone(round_id, result.rejected), now, **norms)

    def _pump(self, now: float) -> None:
        for learner in self._present():
            learner.port.downlink.pump(self._newest)
        self._beat(now)

    def _beat(self, now: float) -> None:
        if now >= self._next_beat_s:
            self._next_beat_s = now + _BEAT_S
            self._beats += 1
            self._write_boards()
            if now >= self._next_sample_s:
                self._next_sample_s = now + _SAMPLE_S
                self._sample()

    def _write_boards(self) -> None:
        phase = {"running": RUNNING, "draining": DRAINING, "finished": DRAINING}[self.protocol.phase]
        if self._leaving:
            phase = FINISHED_AFTER_LOSS if self.after_loss else FINISHED
        tokens = self.protocol.processed_tokens
        for learner in self._present():
            missed = self._leaving and self.after_loss and not learner.port.downlink.idle
            learner.port.write_board(
                heartbeat=self._beats,
                step=self.protocol.step,
                stop_step=self.protocol.stop_step,
                phase=FINISHED_WITHOUT if missed else phase,
                tokens=tokens,
                limit_step=self.protocol.limit_step(),
                checkpoint_step=self._checkpoint_step,
            )

    def _sample(self) -> None:
        now = time.monotonic()
        learners = {}
        for m, x in self.learners.items():
            if not x.lost:
                gap = x.max_gap_s if x.done else max(x.max_gap_s, now - x.moved_s)
                x.max_gap_s = 0.0
                step, num_steps, tokens = x.progress
                learners[m] = {"step": step, "num_steps": num_steps, "tokens": tokens, "loss": x.loss, "max_gap_s": gap}
        if self._refresh is not None and (self._refreshed is None or self._refreshed.done()):
            if self._refreshed is not None and (error := self._refreshed.exception()) is not None:
                self._refresh = None  # another host has taken the folder over
                self.request_stop(str(error))
            else:
                self._refreshed = self._refresher.submit(self._refresh)
        self.saver.report()
        self._trace.write("Sample", step=self.protocol.step, learners=learners)
        status = self.protocol.status()
        if status != self._status:
            self._status = status
            if status not in ("running", "finished"):
                self._view.say(status)

    # ----------------------------------------------------------------------------------------- events and actions

    def _tell(self, event: ev.Event, now: float, **extra: Any) -> None:
        """Hand an event to the protocol and carry out what it answers."""
        actions = self.protocol.handle(event, now)
        if not isinstance(event, (ev.Progress, ev.Tick)):
            self._note(event, **extra)
        self._free_ended_lines()
        for action in actions:
            self._note(action)
            self._actions[type(action)](self, action)

    def _free_ended_lines(self) -> None:
        self._ended_lines = {r: line for r, line in self._lines.items() if r not in self.protocol.rounds}
        for round_id, line in self._ended_lines.items():
            del self._lines[round_id]
            self._free_lines.append(line)
            for learner in self.learners.values():
                learner.verified.pop(round_id, None)

    def _note(self, item: ev.Event | ev.Action, **extra: Any) -> None:
        fields = ev.to_dict(item)
        self._trace.write(fields.pop("kind"), t=self.protocol.step, **fields, **extra)

    def _open(self, a: ev.OpenRound) -> None:
        line = self._free_lines.pop(0)
        self._lines[a.round] = line
        for learner in self._present():
            learner.port.ask(line, pack(a.round, a.fragment, a.base_version))

    def _close(self, a: ev.CloseRound) -> None:
        line = self._lines[a.round] if a.round in self._lines else self._ended_lines[a.round]
        for learner in self._present():
            learner.port.ask(line, 0)

    def _merge(self, a: ev.Merge) -> None:
        inputs = []
        for c in a.contributors:
            contribution = self.learners[c.learner_id].verified[a.round]
            inputs.append(Input(c.learner_id, c.weight, c.step, contribution.floats, contribution.counters))
        self._merges[a.round] = self._merger.submit(self.state.step, a.fragment, a.version, inputs)

    def _publish(self, a: ev.Publish) -> None:
        self.num_in_last_merge = len(a.merged)
        self._steps[a.fragment] = a.step
        self._published.pop(a.fragment, None)
        for m, learner in self.learners.items():
            if m in a.merged:
                learner.port.downlink.contains[a.fragment] = a.round
            learner.port.downlink.offer(a.fragment)
        for m in a.merged:
            self._resolve(self.learners[m], a.round, MERGED)

    def _newest(self, fragment: int) -> Published:
        """The present version of a fragment, as it goes to every learner."""
        item = self._published.get(fragment)
        if item is None:
            v = self.state[fragment]
            item = Published(fragment, v.version, self._steps[fragment], v.wire, v.counters)
            self._published[fragment] = item
        return item

    def _reject(self, a: ev.Reject) -> None:
        learner = self.learners[a.learner_id]
        if a.cause not in _ORDINARY_CAUSES and a.cause not in learner.causes_said:
            learner.causes_said.add(a.cause)
            self._view.say(f"learner {a.learner_id}: a contribution is refused ({a.cause}): {a.reason}")
        self._resolve(learner, a.round, NOT_MERGED)

    def _resolve(self, learner: _Learner, round_id: int, outcome: int) -> None:
        """Tell a learner what became of its answer, on the line on which it came; once, however late."""
        line = learner.undecided.pop(round_id, None)
        if line is not None:
            learner.port.resolve(line, round_id, outcome)

    def _stop_at(self, a: ev.StopAt) -> None:
        self._write_boards()

    def _finish(self, a: ev.Finish) -> None:
        self.outcome = a.reason

    def _save(self, a: ev.Checkpoint) -> None:
        """Start to write the present state beside the work; a failure is a warning, never the end of training."""
        checkpoint = Checkpoint(
            step=a.step,
            layout=self.layout,
            fragments=tuple(FragmentState(v.version, v.theta, v.momentum, v.counters) for v in self.state.versions()),
            protocol=self.protocol.snapshot(),
            config_toml=to_toml({f.name: getattr(self.config, f.name) for f in dataclasses.fields(Config)}),
            meta={"reason": a.reason, "frozen": self._frozen},
        )
        if self.saver.save(checkpoint, last=self.protocol.phase == "finished") and self.protocol.phase == "running":
            self._checkpoint_step = a.step

    _actions: ClassVar[dict[type[ev.Action], Callable[[Syncer, Any], None]]] = {
        ev.OpenRound: _open,
        ev.CloseRound: _close,
        ev.Merge: _merge,
        ev.Publish: _publish,
        ev.Reject: _reject,
        ev.StopAt: _stop_at,
        ev.Checkpoint: _save,
        ev.Finish: _finish,
    }

    # -------------------------------------------------------------------------------------------------- the end

    def _leave(self) -> None:
        """Let the learners take the last fragments and go; see the last checkpoint written.

        The syncer beats on meanwhile, so that nobody takes a long write for its end. What the learners are told decides
        how everybody leaves MPI (after_loss).
        """
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and not all(x.port.downlink.idle or x.silent for x in self._present()):
            self._settle()
        self._sample()
        self.after_loss = bool(self.num_lost or self.num_silent or self.ends_apart)
        self._leaving = True
        self._write_boards()  # learners leave close()
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and not all(x.left or x.silent for x in self._present()):
            self._settle()
        # Their last word has arrived, and they do not know it yet: the answer to one more read of the board tells them.
        deadline = time.monotonic() + _LINGER_S
        overdue = time.monotonic() + self.config.timeouts.save_s
        while self.saver.is_writing or time.monotonic() < deadline:
            self._settle()
            self.saver.report()
            if self.saver.is_writing and time.monotonic() > overdue:
                self.saver.give_up(self.config.timeouts.save_s)
        self.saver.close()
        for pool in (self._merger, self._refresher):
            pool.shutdown(wait=False)
        self._trace.write("Result", **self.result())
        where = f"; the model is in {self._folder}" if self._folder and self.ended_well else ""
        why = self.protocol.stop_reason or self.outcome
        self._view.say(
            f"the run has ended at step {self.protocol.step} ({why}), {self.protocol.num_merges} merges{where}"
        )
        self._trace.close()
        self._view.close()

    def _settle(self) -> None:
        now = time.monotonic()
        for m, learner in self.learners.items():
            if not learner.lost:
                self._look_at(m, learner, now)
                learner.port.downlink.pump(self._newest)
        self._beat(now)
        time.sleep(_POLL_S)

    def result(self) -> dict[str, Any]:
        """The figures of the run, for the report."""
        p = self.protocol
        return {
            "outcome": self.outcome,
            "ended_by": p.stop_reason or self.outcome,
            "step": p.step,
            "num_merges": p.num_merges,
            "achieved_H": p.achieved_interval_steps(),
            "rejected": dict(p.rejected),
            "ignored": dict(p.ignored),
            "tokens": dataclasses.asdict(p.tokens()),
            "learners": len(self.learners),
            "num_lost": self.num_lost,
            "merged_by_learner": {m: r.num_merged for m, r in p.learners.items()},
            "seconds": time.monotonic() - self.started_s,
            "unsaved": self.saver.unsaved,
        }
