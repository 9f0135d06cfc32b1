"""The learner: what happens at a step boundary (paper, learner).

Here: counters, receipts (replace and rebase), snapshots with error feedback, the group's common orders, the end. Not
here: MPI (link/world.py), moving bytes (link/courier.py), torch modules' insides (replica.py).

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import Config
from ..core.kernels import encode_bf16
from ..core.layout import Layout, slice_bounds
from ..errors import ConfigError, ProtocolError, TransportError
from ..link.buffers import BufferPool
from ..link.courier import Arrival, Courier, Upload
from ..link.mailbox import (
    ANNOUNCED,
    CLOSING,
    DECLINED,
    FINISHED,
    FINISHED_AFTER_LOSS,
    LEFT,
    NOT_MERGED,
    RUNNING,
    TRAINING,
    Board,
    Geometry,
    UpHeader,
    pack,
    unpack,
)
from ..store.trace import Trace
from .averaging import GradientAverager
from .replica import Replica
from .shards import Shard

__all__ = ["Learner", "Link"]

log = logging.getLogger(__name__)

_NO_COUNTERS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_MANY_SOURCES = 16  # given to shard(): more are surely one that is made anew in each epoch
_CLOSE_SLACK_S = 15.0  # on top of drain_s, for the last fragments
_WITH_BOARD, _ENOUGH = 1, 2  # first word of an order: rank 0's board follows; what all are waiting in is given up


@dataclass
class Link:
    """Everything that connects a learner's rank with its group and its syncer; None for a learner that is alone."""

    courier: Courier
    pool: BufferPool
    geometry: Geometry
    layout: Layout
    group: Any  # world.Group
    run_token: int
    incarnation: int
    versions: list[int]
    anchors: list[NDArray[np.float32]]
    step: int
    tokens: int  # of the whole run when this learner attached
    leave: Callable[[int, bool], None]  # (exit code, lost): end this process's part in MPI


@dataclass
class _Push:
    """A contribution whose outcome is not yet known.

    ``snapshot`` holds this rank's slice of theta (all of it under rebase, which needs it at the receipt), and, under
    replace, once ``encoded``, the outer gradient in its place.
    """

    round: int
    line: int
    base_version: int
    anchor: NDArray[np.float32]
    snapshot: NDArray[np.float32]
    at_step: int  # inner steps made when it was taken
    at_tokens: int | None  # tokens by then; with G > 1 known one boundary later
    clock: int
    residual: NDArray[np.float32] | None = None  # what error feedback keeps if it is merged
    encoded: bool = False


@dataclass
class _Held:
    """A fragment as this learner holds it: the version, its values at the receipt, the counters since then."""

    version: int
    anchor: NDArray[np.float32]
    since_step: int = 0
    since_tokens: int | None = 0
    push: _Push | None = None
    residual: NDArray[np.float32] | None = None
    refused_round: int = 0  # not answered again; the syncer asks anew in another round
    encodes: int = 0  # encodings that the link thread has not finished


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
        self._replica = replica
        self._link = link
        self._receipts = receipts
        self._save = save
        self._save_beside = save_beside  # beside training, with each checkpoint of the syncer
        self._board: Board | None = None
        self._held = [_Held(v, a) for v, a in zip(link.versions, link.anchors, strict=True)] if link else []
        self._wants_tokens: list[Callable[[int], None]] = []
        self._order: tuple[Any, Any, NDArray[np.int64], NDArray[np.uint64]] | None = None
        self._pushed: dict[int, _Held] = {}  # slots that hold a push of unknown outcome, and of which fragment
        self._declined: dict[int, int] = {}  # line -> round that was declined last
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

    # ------------------------------------------------------------------------------------------ the user's loop

    @property
    def running(self) -> bool:
        """Whether the run goes on; False once the syncer's stop step is reached."""
        return not (self._stopped or self._closed)

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
            ConfigError: if there is not an item for every rank, or if a DataLoader's workers would be forked.
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
        plus the copies of at most a few fragments.

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
        self._exchange(int(tokens))
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

        Afterwards ``model`` holds the syncer's global model (rounded to bfloat16 with ``sync.wire = bf16``). A learner
        whose own data has ended waits here for the others, as long as the syncer answers; from the end of the run on it
        waits for ``timeouts.drain_s``. May be called twice.
        """
        if self._closed:
            return
        self._state = CLOSING
        link = self._link
        if link is not None:
            self._drain(link)
            if self._averager is not None:
                self._averager.close()
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

    # ------------------------------------------------------------------------------------------ the exchange

    def _exchange(self, tokens: int) -> None:
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
        link.courier.boundary_done()

    def _count_tokens(self, tokens: int) -> None:
        self.tokens += tokens
        for fill in self._wants_tokens:
            fill(self.tokens)
        self._wants_tokens.clear()

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
            step_s=self._step_s,
        )

    def _obey(self, link: Link, board: Board, upto_sequence: int) -> None:
        """What is done at a boundary; depends on nothing but the arguments and state equal on all ranks."""
        self._board = board
        self._take_outcomes(board)
        arrivals = link.courier.arrivals(upto_sequence)
        if arrivals:
            self._take_arrivals(link, arrivals)
        for line, word in enumerate(board.rounds):
            if word:
                self._answer(link, line, word)
        if board.checkpoint_step is not None and board.checkpoint_step != self._saved_step:
            self._saved_step = board.checkpoint_step
            if self._save_beside is not None:
                self._save_beside(self)
        stop = board.stop_step
        self._stopped = board.phase != RUNNING or (stop is not None and self.step_count >= stop)

    # -- receipts

    def _take_outcomes(self, board: Board) -> None:
        """A refused push is forgotten and its base may be used again; a merged one is settled by its receipt."""
        for line, held in list(self._pushed.items()):
            push = held.push
            assert push is not None
            if board.outcomes[line] == (push.round << 32 | NOT_MERGED):
                held.refused_round = push.round
                self._settle(held, push)  # held.residual is still the one from before the push (rule 5)

    def _settle(self, held: _Held, push: _Push) -> None:
        assert self._link is not None
        held.push = None
        del self._pushed[push.line]
        if push.encoded:  # else the link thread still reads it: left to the garbage collector
            self._link.pool.give(push.snapshot)

    def _take_arrivals(self, link: Link, arrivals: list[Arrival]) -> None:
        """Apply what has come, oldest first, the newest version of each; not all at once after a long stop."""
        newest = {a.fragment: a for a in arrivals}
        superseded = [a for a in arrivals if newest[a.fragment] is not a]
        chosen = sorted(newest.values(), key=lambda a: a.sequence)[: max(2, math.ceil(len(newest) / 4))]
        for arrival in superseded:
            link.pool.give(arrival.floats)
        link.courier.taken(superseded + chosen)
        for arrival in chosen:
            self._receive(link, arrival)
            self.step_count = max(self.step_count, arrival.step)

    def _receive(self, link: Link, arrival: Arrival) -> None:
        """Rule 5: replace takes Theta as it is; rebase keeps what was learnt beyond it."""
        p, held = arrival.fragment, self._held[arrival.fragment]
        theta, push, old_anchor = arrival.floats, held.push, held.anchor
        contained = push is not None and arrival.contains_round == push.round
        if self._config.sync.receipt == "replace":
            self._replica.copy_in(p, theta)
            held.since_step, held.since_tokens = self.num_steps, self._tokens_now(held, "since_tokens")
        else:
            local = link.pool.take(len(theta))
            self._replica.copy_out(p, local)
            local -= push.snapshot if contained and push is not None else old_anchor
            local += theta
            self._replica.copy_in(p, local)
            link.pool.give(local)
            if contained and push is not None:
                held.since_step, held.since_tokens = push.at_step, push.at_tokens
            elif push is not None:  # what was pushed, seen from the new anchor
                moved = link.pool.take(len(theta))
                np.subtract(theta, old_anchor, out=moved)
                moved += push.snapshot
                if push.encoded:  # else the link thread still reads it: left to the garbage collector
                    link.pool.give(push.snapshot)
                push.snapshot = moved
        held.anchor, held.version = theta, arrival.version
        if contained and push is not None:
            if push.residual is not None:
                held.residual = push.residual  # it was merged: what was rounded off goes with the next push
            self._settle(held, push)
        if held.push is None and held.encodes == 0:
            link.pool.give(old_anchor)
        self._replica.set_counters(p, arrival.counters)
        self._receipts.write(
            "Received",
            fragment=p,
            version=arrival.version,
            step=self.step_count,
            num_steps=self.num_steps,
            contains_round=arrival.contains_round,
            cursor=[s.position for s in self.shards],
        )

    def _tokens_now(self, target: Any, name: str) -> int | None:
        """The tokens up to this boundary; with G > 1 they are filled in at the next one."""
        if self.num_ranks == 1:
            return self.tokens
        self._wants_tokens.append(lambda total: setattr(target, name, total))
        return None

    # -- contributions

    def _answer(self, link: Link, line: int, word: int) -> None:
        """Rules 2 and 4: answer once, from the version the round asks for, with at least one step of progress."""
        round_id, p, base_low = unpack(word)
        held = self._held[p]
        if held.push is not None or held.version & 0xFFFF != base_low or line in self._pushed:
            return
        if held.refused_round == round_id:
            return
        if self.num_steps == held.since_step:
            if self._state == CLOSING and self.rank == 0 and self._declined.get(line) != round_id:
                self._declined[line] = round_id
                link.courier.announce(line, pack(round_id, p, DECLINED))
            return
        push = self._snapshot(link, p, held, round_id, line)
        held.push = push
        self._pushed[line] = held
        if self.rank == 0:
            link.courier.announce(line, pack(round_id, p, ANNOUNCED))
        if push.at_tokens is not None:
            self._submit(link, p, held, push)
        else:
            self._wants_tokens.append(lambda _total: self._submit(link, p, held, push))

    def _snapshot(self, link: Link, p: int, held: _Held, round_id: int, line: int) -> _Push:
        n = link.layout.fragments[p].num_elements
        low, high = (0, n) if self._config.sync.receipt == "rebase" else slice_bounds(n, self.num_ranks, self.rank)
        snapshot = link.pool.take(high - low)
        self._replica.copy_out(p, snapshot, low)
        push = _Push(round_id, line, held.version, held.anchor, snapshot, self.num_steps, None, self.step_count)
        push.at_tokens = self._tokens_now(push, "at_tokens")
        return push

    def _submit(self, link: Link, p: int, held: _Held, push: _Push) -> None:
        fragment = link.layout.fragments[p]
        low, high = slice_bounds(fragment.num_elements, self.num_ranks, self.rank)
        header = None
        counters = _NO_COUNTERS
        if self.rank == 0:
            counters = self._replica.counters(p)
            assert push.at_tokens is not None
            assert held.since_tokens is not None
            header = UpHeader(
                run_token=link.run_token,
                round=push.round,
                fragment=p,
                base_version=push.base_version,
                step=push.clock,
                c_steps=push.at_step - held.since_step,
                c_tokens=push.at_tokens - held.since_tokens,
                incarnation=link.incarnation,
                num_elements=fragment.num_elements,
                num_counters=fragment.num_counters,
            )
        held.encodes += 1
        encode = self._encoder(link, held, push, low, high)
        link.courier.submit(
            Upload(
                push.round,
                push.line,
                p,
                fragment.num_elements,
                fragment.num_counters,
                encode,
                header,
                counters,
            )
        )

    def _encoder(self, link: Link, held: _Held, push: _Push, low: int, high: int) -> Callable[[], NDArray[np.uint8]]:
        """The slice of the outer gradient (anchor minus theta) as it goes on the wire; runs in the link thread."""
        rebase = self._config.sync.receipt == "rebase"
        theta = push.snapshot[low:high] if rebase else push.snapshot

        def encode() -> NDArray[np.uint8]:
            # rebase needs the snapshot again at the receipt; else its buffer takes the difference
            delta = np.subtract(push.anchor[low:high], theta, out=None if rebase else theta)
            wire: NDArray[Any] = delta
            if link.geometry.wire == "bf16":
                push.residual = np.zeros_like(delta) if held.residual is None else held.residual.copy()
                wire = np.empty(len(delta), dtype=np.uint16)
                encode_bf16(delta, push.residual, wire)
            push.encoded = True
            held.encodes -= 1
            return wire.view(np.uint8)

        return encode

    # -- lock-step, the end, and what goes wrong

    def _wait_in_lockstep(self) -> None:
        """Option ``sync.lockstep_steps``: wait until the syncer lets everybody make the next step."""
        assert self._link is not None
        deadline = time.monotonic() + self._config.timeouts.heartbeat_s
        self._may_leave = False
        while self._is_held_back() and self.running and not self._may_leave:
            time.sleep(0.0005)
            self._wants_to_leave = time.monotonic() > deadline
            self._exchange(0)
        self._wants_to_leave = False

    def _is_held_back(self) -> bool:
        if self._board is None:
            return True
        limit = self._board.limit_step
        return limit is not None and (self.step_count >= limit or bool(self._pushed))

    def _drain(self, link: Link) -> None:
        """Serve rounds until the syncer says that the run is over (rule 7)."""
        drain_s = self._config.timeouts.drain_s + _CLOSE_SLACK_S
        deadline: float | None = None
        extra = 2  # orders are one boundary late
        self._may_leave = False
        while extra:
            self._exchange(0)
            phase = RUNNING if self._board is None else self._board.phase
            now = time.monotonic()
            if phase in (FINISHED, FINISHED_AFTER_LOSS):
                extra -= 1
            elif phase != RUNNING and deadline is None:
                deadline = now + drain_s
            self._wants_to_leave = deadline is not None and now > deadline
            if self._may_leave:
                log.warning(
                    "%s: the last rounds took more than %.0f s; leaving without their result", self._who, drain_s
                )
                return
            if self._is_syncer_gone(link):
                self._give_up_on_syncer()
            time.sleep(0.001)
        while remaining := link.courier.arrivals(link.courier.received_sequence):
            self._take_arrivals(link, remaining)

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
                "its newest checkpoint",
                self._who,
                self._link.courier.failure,
            )
        else:
            log.error(
                "%s: the syncer must answer within %.0f s (timeouts.syncer_s) and did not; the learner's state is "
                "saved, resume the run from its newest checkpoint",
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
