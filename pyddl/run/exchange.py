"""A learner's side of each fragment, in the order of its journey: answer, snapshot, outcome, receipt.

Here: what is done with fragments at a step boundary, as a function of the down board and of state that is equal on all
ranks of a learner. Not here: which board counts at which boundary, the end (learner.py); torch modules' insides
(replica.py); moving bytes (link/courier.py).

A fragment is *held* in a version (its values then are the anchor). A round on the board is *answered*: a snapshot is
taken, an announcement written (training thread). It is copied, encoded and *sent* (link thread). Its outcome word says
*merged* or *refused*: refused, the base may be used again; merged, the published fragment that contains it is received
(training thread), and the fragment is held in that version.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.kernels import encode_bf16
from ..core.layout import Layout, slice_bounds
from ..link.buffers import BufferPool
from ..link.courier import Arrival, Courier, Upload
from ..link.mailbox import ANNOUNCED, DECLINED, NOT_MERGED, Board, Geometry, UpHeader, pack, unpack
from ..store.trace import Trace
from .replica import CopyOut, Replica

__all__ = ["Boundary", "Exchange", "Link"]

log = logging.getLogger(__name__)

_NO_COUNTERS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


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
class Boundary:
    """Where a learner stands at a step boundary; equal on all of its ranks, but for the cursor.

    Attributes:
        num_steps: inner steps made.
        clock: t_m; raised to the syncer's by what is received.
        tokens: of all ranks; None with G > 1, where they are known one boundary later.
        closing: no further step will be made.
        in_flight: gives the rounds that may be open at once at this position of the schedule of H.
        cursor: positions in the data, for the tape.
    """

    num_steps: int
    clock: int
    tokens: int | None
    closing: bool
    in_flight: Callable[[], int]
    cursor: list[int]


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
    copy: CopyOut  # into ``snapshot``; finished before the parameters change
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
    num_submitted: int = 0  # uploads; written by the training thread
    num_encoded: int = 0  # of them; written by the link thread: until then it reads the anchor


class Exchange:
    """All fragments of one rank of one learner.

    Args:
        link: to the syncer.
        replica: the model.
        receipts: the learner's tape.
        receipt: replace or rebase.
        num_ranks: G.

    Attributes:
        copies_later: snapshots are copied beside the next step. So from the first :meth:`before_change` on, which shows
            that it is called before each change of the parameters, until something else is seen to change them.
    """

    def __init__(self, link: Link, replica: Replica, receipts: Trace, *, receipt: str, num_ranks: int) -> None:
        self.fragments = [_Held(v, a) for v, a in zip(link.versions, link.anchors, strict=True)]
        self._link = link
        self._replica = replica
        self._receipts = receipts
        self._rebases = receipt == "rebase"
        self._rank = link.group.rank
        self._num_ranks = num_ranks
        self.copies_later = False
        self._was_overtaken = False
        self._copies: list[CopyOut] = []
        self._wants_tokens: list[Callable[[int], None]] = []
        self._pushed: dict[int, _Held] = {}  # slots that hold a push of unknown outcome, and of which fragment
        self._declined: dict[int, int] = {}  # line -> round that was declined last

    @property
    def awaits_outcome(self) -> bool:
        """Whether something was pushed of which the outcome is not known."""
        return bool(self._pushed)

    def count_tokens(self, total: int) -> None:
        """The tokens up to the last boundary, of all ranks."""
        for fill in self._wants_tokens:
            fill(total)
        self._wants_tokens.clear()

    def before_change(self) -> None:
        """The parameters are about to change: see to it that the snapshots are whole. Training thread."""
        self._finish_copies()
        self.copies_later = not self._was_overtaken

    def _finish_copies(self) -> None:
        for copy in self._copies:
            if not self._was_overtaken and copy.is_overtaken():
                self._was_overtaken, self.copies_later = True, False
                log.warning(
                    "parameters must not change between learner.step() and the optimizer's next step(); they did, so "
                    "that a contribution may mix values from before and after: set sync.overlap_snapshots=false; "
                    "snapshots are copied at once from now on"
                )
            copy.finish()
        self._copies.clear()

    def carry_out(self, board: Board, upto_sequence: int, here: Boundary) -> None:
        """Outcomes, receipts and answers of one boundary.

        Args:
            board: as the learner's rank 0 has read it.
            upto_sequence: published fragments up to this sequence number are held by all ranks.
            here: the boundary; its clock is raised to that of what is received.

        Raises:
            ConfigError: if the model is no longer the one that was attached (replica.py).
        """
        self._take_outcomes(board)
        self.receive(upto_sequence, here)
        for line, word in enumerate(board.rounds):
            if word:
                self._answer(line, word, here)

    # -- answers and snapshots

    def _answer(self, line: int, word: int, here: Boundary) -> None:
        """Rules 2 and 4: answer once, from the version the round asks for, with at least one step of progress."""
        courier = self._link.courier
        round_id, p, base_low = unpack(word)
        held = self.fragments[p]
        if held.push is not None or held.version & 0xFFFF != base_low or line in self._pushed:
            return
        if held.refused_round == round_id:
            return
        if here.num_steps == held.since_step:
            if here.closing and self._rank == 0 and self._declined.get(line) != round_id:
                self._declined[line] = round_id
                courier.announce(line, pack(round_id, p, DECLINED))
            return
        push = self._snapshot(p, held, round_id, line, here)
        held.push = push
        held.num_submitted += 1
        self._pushed[line] = held
        if self._rank == 0:
            courier.announce(line, pack(round_id, p, ANNOUNCED))
        counters = self._replica.counters(p) if self._rank == 0 else _NO_COUNTERS
        if push.at_tokens is not None:
            self._submit(p, held, push, counters)
        else:
            self._wants_tokens.append(lambda _total: self._submit(p, held, push, counters))

    def _snapshot(self, p: int, held: _Held, round_id: int, line: int, here: Boundary) -> _Push:
        low, high = self._slice(p)
        if self._rebases:
            low, high = 0, self._link.layout.fragments[p].num_elements
        snapshot = self._link.pool.take(high - low)
        copy = self._replica.begin_copy_out(p, snapshot, low)
        if self.copies_later:
            self._copies.append(copy)
            self._link.courier.do_soon(copy.finish)
        else:
            copy.finish()
        push = _Push(round_id, line, held.version, held.anchor, snapshot, here.num_steps, None, here.clock, copy)
        push.at_tokens = self._tokens_now(here, push, "at_tokens")
        return push

    def _slice(self, p: int) -> tuple[int, int]:
        return slice_bounds(self._link.layout.fragments[p].num_elements, self._num_ranks, self._rank)

    def _submit(self, p: int, held: _Held, push: _Push, counters: NDArray[np.int64]) -> None:
        """Hand a snapshot to the link thread."""
        fragment = self._link.layout.fragments[p]
        self._link.courier.submit(
            Upload(
                round=push.round,
                line=push.line,
                fragment=p,
                num_elements=fragment.num_elements,
                num_counters=fragment.num_counters,
                encode=self._encoder(p, held, push),
                counters=counters,
            )
        )

    def _encoder(self, p: int, held: _Held, push: _Push) -> Callable[[], tuple[UpHeader | None, NDArray[np.uint8]]]:
        """What the link thread calls: the header (rank 0's) and the slice of the outer gradient as it goes on the wire.

        The outer gradient is the anchor minus theta. What a receipt may change until then is taken down now.
        """
        assert push.at_tokens is not None
        assert held.since_tokens is not None
        c_steps, c_tokens = push.at_step - held.since_step, push.at_tokens - held.since_tokens
        low, high = self._slice(p)
        theta = push.snapshot[low:high] if self._rebases else push.snapshot

        def encode() -> tuple[UpHeader | None, NDArray[np.uint8]]:
            push.copy.finish()
            # rebase needs the snapshot again at the receipt; else its buffer takes the difference
            delta = np.subtract(push.anchor[low:high], theta, out=None if self._rebases else theta)
            wire: NDArray[Any] = delta
            if self._link.geometry.wire == "bf16":
                push.residual = np.zeros_like(delta) if held.residual is None else held.residual.copy()
                wire = np.empty(len(delta), dtype=np.uint16)
                encode_bf16(delta, push.residual, wire)
            push.encoded = True
            held.num_encoded += 1
            return self._header(p, push, c_steps, c_tokens) if self._rank == 0 else None, wire.view(np.uint8)

        return encode

    def _header(self, p: int, push: _Push, c_steps: int, c_tokens: int) -> UpHeader:
        fragment = self._link.layout.fragments[p]
        return UpHeader(
            run_token=self._link.run_token,
            round=push.round,
            fragment=p,
            base_version=push.base_version,
            step=push.clock,
            c_steps=c_steps,
            c_tokens=c_tokens,
            incarnation=self._link.incarnation,
            num_elements=fragment.num_elements,
            num_counters=fragment.num_counters,
        )

    def _tokens_now(self, here: Boundary, target: Any, name: str) -> int | None:
        """The tokens up to this boundary; with G > 1 they are filled in at the next one."""
        if here.tokens is None:
            self._wants_tokens.append(lambda total: setattr(target, name, total))
        return here.tokens

    # -- outcomes and receipts

    def _take_outcomes(self, board: Board) -> None:
        """A refused push is forgotten and its base may be used again; a merged one is settled by its receipt."""
        for line, held in list(self._pushed.items()):
            push = held.push
            assert push is not None
            if board.outcomes[line] == (push.round << 32 | NOT_MERGED):
                held.refused_round = push.round
                self._settle(held, push)  # held.residual is still the one from before the push (rule 5)

    def _settle(self, held: _Held, push: _Push) -> None:
        held.push = None
        del self._pushed[push.line]
        if push.encoded:  # else the link thread still reads it: left to the garbage collector
            self._link.pool.give(push.snapshot)

    def receive(self, upto_sequence: int, here: Boundary) -> bool:
        """Apply what has come, oldest first, the newest version of each; not all at once after a long stop.

        Returns: whether there was anything.
        """
        self._finish_copies()  # the optimizer's step may have been left out, as a GradScaler does
        link = self._link
        arrivals = link.courier.arrivals(upto_sequence)
        if not arrivals:
            return False
        newest = {a.fragment: a for a in arrivals}
        superseded = [a for a in arrivals if newest[a.fragment] is not a]
        chosen = sorted(newest.values(), key=lambda a: a.sequence)
        if len(chosen) > 1:  # as many as may be in flight at once, else receipts fall behind the rounds that H asks for
            chosen = chosen[: max(here.in_flight(), math.ceil(len(newest) / 4))]
        for arrival in superseded:
            link.pool.give(arrival.floats)
        link.courier.taken(superseded + chosen)
        for arrival in chosen:
            self._apply(arrival, here)
            here.clock = max(here.clock, arrival.step)
        return True

    def _apply(self, arrival: Arrival, here: Boundary) -> None:
        """Rule 5: replace takes Theta as it is; rebase keeps what was learnt beyond it."""
        pool, p, held = self._link.pool, arrival.fragment, self.fragments[arrival.fragment]
        theta, push, old_anchor = arrival.floats, held.push, held.anchor
        contained = push is not None and arrival.contains_round == push.round
        if not self._rebases:
            self._replica.copy_in(p, theta)
            held.since_step, held.since_tokens = here.num_steps, self._tokens_now(here, held, "since_tokens")
        else:
            local = pool.take(len(theta))
            self._replica.copy_out(p, local)
            local -= push.snapshot if contained and push is not None else old_anchor
            local += theta
            self._replica.copy_in(p, local)
            pool.give(local)
            if contained and push is not None:
                held.since_step, held.since_tokens = push.at_step, push.at_tokens
            elif push is not None:  # what was pushed, seen from the new anchor
                moved = pool.take(len(theta))
                np.subtract(theta, old_anchor, out=moved)
                moved += push.snapshot
                if push.encoded:  # else the link thread still reads it: left to the garbage collector
                    pool.give(push.snapshot)
                push.snapshot = moved
        held.anchor, held.version = theta, arrival.version
        if contained and push is not None:
            if push.residual is not None:
                held.residual = push.residual  # it was merged: what was rounded off goes with the next push
            self._settle(held, push)
        if held.push is None and held.num_encoded == held.num_submitted:
            pool.give(old_anchor)
        self._replica.set_counters(p, arrival.counters)
        self._receipts.write(
            "Received",
            fragment=p,
            version=arrival.version,
            step=here.clock,
            num_steps=here.num_steps,
            contains_round=arrival.contains_round,
            cursor=here.cursor,
        )

    def adopt_global(self) -> None:
        """At the end: the model becomes what was received last of each fragment, whatever was learnt since."""
        self._finish_copies()
        for p, held in enumerate(self.fragments):
            self._replica.copy_in(p, held.anchor)
