"""The learner: the user's loop, and whose word counts at a step boundary (paper, learner).

Here: the public methods, the group's common orders, lock-step, the end, and what goes wrong. Not here: what is done
with each fragment (exchange.py), MPI (link/world.py), moving bytes (link/courier.py).

At a boundary every rank of a learner carries out one *order*: the down board as rank 0 has read it, and the sequence
number up to which all ranks hold the published fragments. What is done is a function of the order and of state that
is equal on all ranks, so no rank ever skips or applies alone. With G = 1 the order is the present one; with G > 1 it
is posted at one boundary and carried out at the next (two small non-blocking operations, rule 17).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import Config
from ..core.rounds import rounds_in_flight
from ..errors import ConfigError, ProtocolError, TransportError
from ..link.mailbox import (
    CLOSING,
    FINISHED,
    FINISHED_AFTER_LOSS,
    FINISHED_WITHOUT,
    LEFT,
    RUNNING,
    TRAINING,
    Board,
)
from ..store.trace import Trace
from .averaging import GradientAverager
from .exchange import Boundary, Exchange, Link
from .replica import Replica
from .shards import Shard

__all__ = ["Learner"]

log = logging.getLogger(__name__)

_MANY_SOURCES = 16  # given to shard(): more are surely one that is made anew in each epoch
_CLOSE_SLACK_S = 15.0  # on top of drain_s, for the last fragments
_WITH_BOARD, _ENOUGH = 1, 2  # first word of an order: rank 0's board follows; what all are waiting in is given up


class Learner:
    """One rank of one learner, attached to its model and optimizer. Made by ``Session.attach``.

    Attributes:
        learner_id: 0..M-1; ``num_learners``: M.
        rank: within the learner, 0..G-1; ``num_ranks``: G.
        step_count: t_m, the learner's clock; raised to the syncer's at a receipt.
        num_steps: inner steps really made.
        tokens: tokens this learner has processed (all ranks; with G > 1 as of the step before).
    """

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        link: Link | None,
        *,
        learner_id: int,
        num_learners: int,
        num_ranks: int,
        receipts: Trace,
        save: Callable[[Learner], None],
        save_beside: Callable[[Learner], None] | None = None,
    ) -> None:
        self.learner_id = learner_id
        self.num_learners = num_learners
        self.rank = link.group.rank if link else 0
        self._who = f"learner {learner_id} rank {self.rank}"
        self.num_ranks = num_ranks
        self.num_steps = 0
        self.tokens = 0
        self.step_count = link.step if link else 0
        self.model = model
        self.optimizer = optimizer
        self.shards: list[Shard] = []
        self._config = config
        self._cursors: list[dict[str, Any]] = []
        self._link = link
        self._receipts = receipts
        self._save = save
        self._save_beside = save_beside  # beside training, with each checkpoint of the syncer
        self._board: Board | None = None
        self._hook: Any = None  # before the optimizer's step
        self._exchange: Exchange | None = None
        if link is not None:
            self._exchange = Exchange(link, replica, receipts, receipt=config.sync.receipt, num_ranks=num_ranks)
            if config.sync.overlap_snapshots:
                self._overlap_snapshots(self._exchange)
        self._interval = config.interval
        self._common_sequence = 0  # what all ranks held at the last order
        self._order: tuple[Any, Any, NDArray[np.int64], NDArray[np.uint64]] | None = None
        self._saved_step: int | None = None  # checkpoint of the syncer beside which the state was saved
        self._stopped = False
        self._closed = False
        self._wants_to_leave = False  # this rank has waited long enough; rank 0's word counts, and all follow it
        self._may_leave = False
        self._state = TRAINING
        self._loss: torch.Tensor | float = math.nan
        self._shown = math.nan  # loss of the step before, as it is reported
        self._last_step_s = time.monotonic()
        self._overdue_s: float | None = None  # since when the syncer counts as gone
        self._missed_syncer = False
        self._step_s = 0.05
        self._averager: GradientAverager | None = None
        if link is not None and num_ranks > 1:
            trained = [p for p in model.parameters() if p.requires_grad]
            self._averager = GradientAverager(trained, link.group)

    def _overlap_snapshots(self, exchange: Exchange) -> None:
        """Copy snapshots beside the next step, if the optimizer says when it begins to change what they are of."""
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            log.info("%s: the optimizer is none of torch's and has no hooks: snapshots are copied at once", self._who)
            return
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if not all(id(p) in known for p in self.model.parameters() if p.requires_grad):
            log.info("%s: not all parameters are the attached optimizer's: snapshots are copied at once", self._who)
            return
        try:
            self._hook = self.optimizer.register_step_pre_hook(lambda *_: exchange.before_change())
        except AttributeError:  # a wrapper that is an Optimizer by name only
            log.info("%s: the optimizer has no hooks: snapshots are copied at once", self._who)

    # ------------------------------------------------------------------------------------------ the user's loop

    @property
    def running(self) -> bool:
        """Whether the run goes on; False once the syncer's stop step is reached."""
        return not (self._stopped or self._closed)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed or self._state != TRAINING

    @property
    def progress(self) -> float:
        """Position of the run, 0 to 1: tokens of all learners over max_tokens, or t_m over max_steps.

        For learning-rate schedules; the same on every rank. 0 if the run has no end.
        """
        run = self._config.run
        shares = [0.0]
        if run.max_tokens:  # right after a resume the board is not read yet
            at_attach = self._link.tokens if self._link else self.tokens
            shares.append(max(at_attach, self._board.tokens if self._board else 0) / run.max_tokens)
        if run.max_steps:
            shares.append(self.step_count / run.max_steps)
        return min(1.0, max(shares))

    def shard(self, source: Iterable[Any]) -> Iterator[Any]:
        """This rank's share of the data, until the run ends.

        All ranks of all learners get equally many items in each pass. One log line says how a source is divided.

        Args:
            source: one of three kinds. Pass the same object in every epoch: a further call goes on with its next epoch.

                A ``torch.utils.data.DataLoader`` that reads an indexable data set in order or shuffled: batches are
                made of every (M * G)-th sample, for each rank others; shuffled, of a permutation of pyddl's own per
                (run.seed, epoch). What lacks to a whole number for all is taken again from the start.

                What has ``state_dict`` and ``load_state_dict`` is this rank's own and passed through. It must divide
                the data itself (by ``learner_id`` and ``rank``) and give all ranks of a learner equally many items;
                its state, of JSON values, is saved with the learner's, and loaded on resume before the first item.

                Any other iterable, also a DataLoader with a sampler of its own: each rank takes every (M * G)-th item.
                What does not suffice for all is left out, so that an item is given when all of M * G have been read:
                their memory must not be reused.

        Returns:
            Items of ``source``; again from its start when it ends, if the run has an end of its own (max_steps or
            max_tokens); otherwise one pass.

        Raises:
            ConfigError: if there is not an item for every rank, if a DataLoader draws by a DistributedSampler (the data
                would be divided twice), or if a DataLoader's workers would be forked.
        """
        shard = next((s for s in self.shards if s.source is source), None)
        if shard is None:
            shard = Shard(
                source,
                index=self.learner_id * self.num_ranks + self.rank,
                count=self.num_learners * self.num_ranks,
                seed=self._config.run.seed,
                endless=bool(self._config.run.max_steps or self._config.run.max_tokens),
            )
            if self._cursors:
                shard.load_state_dict(self._cursors.pop(0))
            self.shards.append(shard)
            if len(self.shards) == _MANY_SOURCES:
                log.warning(
                    "learner.shard() should be given the same object in every epoch; it has been given %d, and keeps "
                    "each with its cursor; make the source once, before the loop",
                    _MANY_SOURCES,
                )
        return self._while_running(shard)

    def _while_running(self, items: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(items)
        while self.running:
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item

    def resume_cursors(self, cursors: list[dict[str, Any]]) -> None:
        """Cursors of an earlier run, taken by the calls of :meth:`shard` in order."""
        self._cursors = list(cursors)

    def average_gradients(self) -> None:
        """Average the gradients over this learner's ranks; nothing to do when G = 1.

        Call it after ``backward()`` and before clipping. With a GradScaler call it before ``scaler.unscale_()``, so
        that an overflow on one rank is seen by all. Gradients may have been accumulated over any number of backward
        passes. They may also be changed before it (divided by the number of passes, say), at the price of sums that no
        longer overlap with the backward pass.
        """
        if self._averager is not None:
            try:
                self._averager.average()
            except TransportError as error:
                self._end_with_group(error)

    def step(self, *, tokens: int, loss: torch.Tensor | float = math.nan) -> None:
        """Tell pyddl that an inner step has been made; exchange with the syncer without waiting for it.

        Call it after ``optimizer.step()``, when no graph that needs the parameters is alive. Costs under a millisecond
        plus the copies of at most a few fragments. What is pushed is copied beside the next step: up to the optimizer's
        next ``step()`` nothing else may change the parameters (else set ``sync.overlap_snapshots`` to false).

        Args:
            tokens: tokens (or samples) of this rank's step, >= 1: the weight of the contribution.
            loss: shown in the progress; read one step later, so that it forces no synchronisation.

        Raises:
            ConfigError: if ``tokens`` is not a positive integer.
            ProtocolError: after :meth:`close`.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 1:
            raise ConfigError(f"learner.step(tokens=...) must be an integer of at least 1; got {tokens!r}")
        if self._closed:
            raise ProtocolError("learner.step() must come before close(); this learner is closed")
        now = time.monotonic()
        self._step_s += 0.2 * (now - self._last_step_s - self._step_s)
        self._last_step_s = now
        self.num_steps += 1
        self.step_count += 1
        self._shown = float(self._loss)
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else float(loss)
        if self._link is None:
            self.tokens += int(tokens)
            self._stopped = self.progress >= 1.0
            return
        self._meet_boundary(int(tokens))
        if self.step_count <= self._config.sync.lockstep_steps:
            self._wait_in_lockstep()
        if self._is_syncer_gone(self._link):
            self._give_up_on_syncer()

    def sees_the_end(self) -> bool:
        """Whether the board, as the link thread has read it last, says that the run ends; from any thread."""
        board = None if self._link is None else self._link.courier.board
        return board is not None and (
            board.phase != RUNNING or (board.stop_step is not None and board.stop_step <= board.step)
        )

    def close(self) -> None:
        """End this learner's part: answer the last rounds, take the final model, save the learner's state.

        Afterwards ``model`` holds the syncer's global model (rounded to bfloat16 with ``sync.wire = bf16``), or, if the
        last rounds did not come to their end in time, the newest versions that have come. A learner whose own data has
        ended waits here for the others, as long as the syncer answers; from the end of the run on it waits for
        ``timeouts.drain_s``. May be called twice.
        """
        if self._closed:
            return
        self._state = CLOSING
        link = self._link
        if link is not None:
            self._drain(link)
            if self._averager is not None:
                self._averager.close()
            if self._hook is not None:
                self._hook.remove()
        self._closed = True
        if link is not None:
            lost = self._board is None or self._board.phase != FINISHED
            # The syncer may end as soon as it has read that the learner has left: rank 0 says so when no other rank's
            # link thread talks to the syncer any more.
            if self.rank:
                link.courier.end(self._config.timeouts.stall_s)
            self._part_from_group(link)
            if self.rank == 0:
                self._state = LEFT
                self._report(link)
                link.courier.end(self._config.timeouts.stall_s)
            self._close_receipts(link)
            link.leave(0, lost)
        self._save(self)  # last, since it may take long and nobody should wait for it

    # ------------------------------------------------------------------------------------------ the boundary

    def _meet_boundary(self, tokens: int) -> None:
        """One boundary: obey the order that is due, post the next one."""
        link = self._link
        assert link is not None
        if self.num_ranks == 1:
            self._count_tokens(tokens)
            self._may_leave = self._wants_to_leave
            if link.courier.board is not None:
                self._obey(link, link.courier.board, link.courier.received_sequence)
        else:
            try:
                self._obey_group(link)
                self._post_order(link, tokens)
            except TransportError as error:
                self._end_with_group(error)
        if self.rank == 0:
            self._report(link)
        link.courier.boundary_done(self._step_s)

    def _count_tokens(self, tokens: int) -> None:
        self.tokens += tokens
        assert self._exchange is not None
        self._exchange.count_tokens(self.tokens)

    def _post_order(self, link: Link, tokens: int) -> None:
        held = np.zeros(1 + self.num_ranks, dtype=np.int64)
        held[0] = tokens
        held[1 + self.rank] = link.courier.received_sequence
        words = np.zeros(1 + link.geometry.down_board_words, dtype=np.uint64)
        if self.rank == 0:
            words[0] = _ENOUGH if self._wants_to_leave else 0
            if link.courier.board_words is not None:
                words[0] |= np.uint64(_WITH_BOARD)
                words[1:] = link.courier.board_words
        self._order = (link.group.sum(held), link.group.broadcast(words), held, words)

    def _obey_group(self, link: Link) -> None:
        if self._order is None:
            return
        sums, orders, held, words = self._order
        link.group.wait(sums, "the common sum at a step boundary")
        link.group.wait(orders, "the common orders at a step boundary")
        self._order = None
        self._count_tokens(int(held[0]))
        self._may_leave = bool(int(words[0]) & _ENOUGH)
        if int(words[0]) & _WITH_BOARD:
            self._obey(link, Board.from_words(words[1:], link.geometry.num_slots), int(held[1:].min()))

    def _report(self, link: Link) -> None:
        link.courier.report(
            state=self._state,
            step=self.step_count,
            num_steps=self.num_steps,
            tokens=self.tokens,
            loss=self._shown,
        )

    def _obey(self, link: Link, board: Board, upto_sequence: int) -> None:
        """What is done at a boundary; depends on nothing but the arguments and state equal on all ranks."""
        assert self._exchange is not None
        self._board = board
        self._common_sequence = upto_sequence
        here = self._boundary()
        self._exchange.carry_out(board, upto_sequence, here)
        self.step_count = here.clock
        if board.checkpoint_step is not None and board.checkpoint_step != self._saved_step:
            self._saved_step = board.checkpoint_step
            if self._save_beside is not None:
                self._save_beside(self)
        stop = board.stop_step
        self._stopped = board.phase != RUNNING or (stop is not None and self.step_count >= stop)

    def _boundary(self) -> Boundary:
        tokens = self.tokens if self.num_ranks == 1 else None
        return Boundary(
            num_steps=self.num_steps,
            clock=self.step_count,
            tokens=tokens,
            closing=self._state == CLOSING,
            in_flight=self._in_flight,
            cursor=[s.position for s in self.shards],
        )

    def _in_flight(self) -> int:
        """Rounds that may be open at once at the board's position in the schedule of H."""
        board, link, config = self._board, self._link, self._config
        assert board is not None
        assert link is not None
        interval = self._interval.at(self._interval.position(board.step, board.tokens, config.run.max_tokens))
        return rounds_in_flight(config.sync.in_flight, len(link.layout.fragments), config.sync.tau_steps, interval)

    # -- lock-step, the end, and what goes wrong

    def _wait_in_lockstep(self) -> None:
        """Option ``sync.lockstep_steps``: wait until the syncer lets everybody make the next step."""
        assert self._link is not None
        deadline = time.monotonic() + self._config.timeouts.heartbeat_s
        self._may_leave = False
        while self._is_held_back() and self.running and not self._may_leave:
            time.sleep(0.0005)
            self._wants_to_leave = time.monotonic() > deadline
            self._meet_boundary(0)
        self._wants_to_leave = False

    def _is_held_back(self) -> bool:
        if self._board is None:
            return True
        assert self._exchange is not None
        limit = self._board.limit_step
        return limit is not None and (self.step_count >= limit or self._exchange.awaits_outcome)

    def _drain(self, link: Link) -> None:
        """Serve rounds until the syncer says that the run is over (rule 7)."""
        drain_s = self._config.timeouts.drain_s + _CLOSE_SLACK_S
        deadline: float | None = None
        extra = 2  # orders are one boundary late
        self._may_leave = False
        while extra:
            self._meet_boundary(0)
            phase = RUNNING if self._board is None else self._board.phase
            now = time.monotonic()
            if phase in (FINISHED, FINISHED_AFTER_LOSS, FINISHED_WITHOUT):
                extra -= 1
            elif phase != RUNNING and deadline is None:
                deadline = now + drain_s
            self._wants_to_leave = deadline is not None and now > deadline
            if self._may_leave:
                log.warning(
                    "%s: the last rounds took more than %.0f s; leaving without their result", self._who, drain_s
                )
                break
            if self._is_syncer_gone(link):
                self._give_up_on_syncer()
            time.sleep(0.001)
        assert self._exchange is not None
        if self._board is not None and self._board.phase == FINISHED_WITHOUT:
            log.warning(
                "%s: it did not answer when the run ended and has missed the last fragments: its model is not the "
                "final one, which is in the run's newest checkpoint",
                self._who,
            )
        if self._board is not None:
            here = self._boundary()
            while self._exchange.receive(self._common_sequence, here):
                self.step_count = here.clock
        self._exchange.adopt_global()

    def _part_from_group(self, link: Link) -> None:
        """No rank ends while a mate may still read from it."""
        if self.num_ranks > 1:
            try:
                link.group.wait(link.group.meet(), "the end")
            except TransportError as error:
                self._end_with_group(error)

    def _is_syncer_gone(self, link: Link) -> bool:
        """Whether it was not heard for too long; looked at twice, since a pause of this process looks alike."""
        now, timeouts = time.monotonic(), self._config.timeouts
        if not link.courier.is_alive():
            return True
        silence_s = now - link.courier.heard_s
        if silence_s > timeouts.heartbeat_s and not self._missed_syncer:
            log.warning(
                "%s: the syncer has not been heard for %.0f s; training goes on, and ends after %.0f s "
                "(timeouts.syncer_s)",
                self._who,
                silence_s,
                timeouts.syncer_s,
            )
        self._missed_syncer = silence_s > timeouts.heartbeat_s
        if silence_s <= timeouts.syncer_s:
            self._overdue_s = None
            return False
        if self._overdue_s is None:
            self._overdue_s = now
        return now - self._overdue_s > min(timeouts.stall_s, timeouts.syncer_s)

    def _give_up_on_syncer(self) -> None:
        """The syncer is silent for longer than anybody should wait: save and end (exit status 75)."""
        assert self._link is not None
        if not self._link.courier.is_alive():
            log.error(
                "%s: the link thread must run and has ended (%s); the learner's state is saved, resume the run from "
                "its newest checkpoint if it has one",
                self._who,
                self._link.courier.failure,
            )
        else:
            log.error(
                "%s: the syncer must answer within %.0f s (timeouts.syncer_s) and did not; the learner's state is "
                "saved, resume the run from its newest checkpoint if it has one",
                self._who,
                self._config.timeouts.syncer_s,
            )
        self._save(self)
        self._close_receipts(self._link)
        self._link.leave(75, True)
        raise SystemExit(75)

    def _end_with_group(self, error: TransportError) -> None:
        """A mate is gone: this rank ends too, and the learner with it (rule 18)."""
        assert self._link is not None
        log.error("%s: %s", self._who, error)
        self._close_receipts(self._link)
        self._link.leave(1, True)
        raise SystemExit(1)

    def _close_receipts(self, link: Link) -> None:
        """The tape's last line says how the link did."""
        courier = link.courier
        self._receipts.write(
            "LinkFigures",
            num_damaged=courier.num_damaged,
            num_stalls=courier.num_stalls,
            failure=None if courier.failure is None else repr(courier.failure),
        )
        self._receipts.close()
