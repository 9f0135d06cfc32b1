"""What a learner leaves in its pool and on its tape."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import LR, TOKENS, Desk, content

from pyddl.errors import ConfigError
from pyddl.link.mailbox import FINISHED, FINISHED_WITHOUT, MERGED, NOT_MERGED
from pyddl.store.trace import read_trace


def test_learner_rebase_push_seen_from_a_new_anchor_lies_in_a_buffer_of_the_pool():
    """Each fresh array would be new pages from the kernel, and lie in the pool under a size that nobody asks for."""
    desk = Desk("sync.receipt=rebase", slots=3)
    pool = desk.box.pool
    r = desk.ask()
    desk.train()
    desk.contribution(r)
    held = desk.learner._exchange.fragments[0]
    before = held.push.snapshot
    taken: list[np.ndarray] = []
    take, give = pool.take, pool.give
    given: list[np.ndarray] = []
    pool.take = lambda n: taken.append(take(n)) or taken[-1]  # type: ignore[method-assign]
    pool.give = lambda buffer: given.append(buffer) or give(buffer)  # type: ignore[method-assign]
    desk.publish(1, 5.0)  # made without this learner's push
    desk.train()
    assert held.version == 1
    assert held.push is not None
    assert any(held.push.snapshot is buffer for buffer in taken)
    assert any(buffer is before for buffer in given), "the old one is free again: it has been encoded"
    assert held.push.snapshot.tolist() == [5 - LR], "what was pushed, seen from the new anchor"
    desk.box.port.resolve(0, r, NOT_MERGED)
    desk.train()
    r = desk.ask(base=1, line=1)
    desk.train()
    assert desk.contribution(r).floats.tolist() == [4 * LR]


def test_learner_rebase_push_that_is_not_yet_encoded_keeps_its_buffer_when_a_receipt_comes():
    desk = Desk("sync.receipt=rebase", slots=3)
    desk.publish(1, 5.0)  # it is held, and applied at the next boundary but one
    courier = desk.box.couriers[0]
    arrivals = courier.arrivals(9)
    courier.taken(arrivals)
    desk.ask()
    desk.box.turns(8)
    for w in desk.model.w:
        w.grad = w.detach() * 0 + 1
    desk.optimizer.step()
    desk.learner.step(tokens=1)
    held = desk.learner._exchange.fragments[0]
    before = held.push.snapshot
    assert not held.push.encoded, "the link thread has had no turn"
    given: list[np.ndarray] = []
    give = desk.box.pool.give
    desk.box.pool.give = lambda buffer: given.append(buffer) or give(buffer)  # type: ignore[method-assign]
    courier._arrivals.extend(arrivals)
    desk.learner.step(tokens=1)
    assert held.version == 1
    assert not any(np.shares_memory(buffer, before) for buffer in given)
    answers, complete = desk.look()
    assert list(answers) == [1]
    assert complete[1].floats.tolist() == [LR], "what was sent is what was learnt from the old anchor"


@pytest.mark.parametrize("failed", [False, True])
def test_learner_tape_ends_with_the_figures_of_the_link(failed: bool, tmp_path: Path):
    desk = Desk("timeouts.syncer_s=0.05", receipts=tmp_path / "receipts.jsonl")
    desk.train(1)
    courier = desk.box.couriers[0]
    courier.num_damaged, courier.num_stalls = 2, 3
    if failed:
        courier.failure = OSError("the network card is gone")
        with pytest.raises(SystemExit):
            desk.learner.close()  # nobody hears the syncer any more
        assert desk.left == [(75, True)]
    else:
        desk.box.beat(phase=FINISHED)
        desk.box.turns(8)
        courier.end = lambda timeout_s: True  # type: ignore[method-assign]
        desk.learner.close()
    last = list(read_trace(tmp_path / "receipts.jsonl"))[-1]
    assert last["kind"] == "LinkFigures"
    assert (last["num_damaged"], last["num_stalls"]) == (2, 3)
    assert last["failure"] == ("OSError('the network card is gone')" if failed else None)


def test_learner_messages_say_whose_they_are(caplog: pytest.LogCaptureFixture):
    desk = Desk("timeouts.syncer_s=0.05")
    with pytest.raises(SystemExit), caplog.at_level(logging.WARNING):
        desk.learner.close()
    assert [r.getMessage().split(": ")[0] for r in caplog.records] == ["learner 3 rank 0"]


def test_learner_model_that_was_converted_after_attach_ends_the_step_with_a_sentence():
    desk = Desk()
    desk.train(1)
    desk.model.half()
    r = desk.ask()
    desk.box.turns(8)
    with pytest.raises(ConfigError, match=r"w\.0 was float32 \[1\] on cpu and is now float16"):
        desk.learner.step(tokens=1)
    assert desk.nothing(), f"round {r} is not answered with wrong numbers"


def test_learner_merged_push_frees_its_buffers_for_the_next():
    desk = Desk("sync.receipt=rebase")
    for version in range(1, 6):
        r = desk.ask(base=version - 1)
        desk.train()
        desk.contribution(r)
        desk.box.port.resolve(0, r, MERGED)
        desk.publish(version, 5.0, contains=r)
        desk.train()
    assert sum(map(len, desk.box.pool._free.values())) >= 1


class OwnOptimizer:
    """Not one of torch's: nothing can be hooked before its step."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                p -= self.lr * p.grad


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, OwnOptimizer])
@pytest.mark.parametrize("receipt", ["replace", "rebase"])
def test_learner_snapshot_is_of_its_boundary_though_it_is_copied_beside_the_next_step(
    receipt: str, optimizer: Any, overlap: str
):
    desk = Desk(f"sync.receipt={receipt}", f"sync.overlap_snapshots={overlap}", optimizer=optimizer)
    desk.step()
    assert desk.learner._exchange.copies_later == (optimizer is torch.optim.SGD and overlap == "true")
    r = desk.ask()
    desk.box.turns(8)
    desk.step()  # taken here ...
    desk.step()  # ... and the link thread has not had a turn when the parameters change again
    assert desk.weight == 8 - 3 * LR
    assert content(desk.contribution(r)) == (2 * LR, 0, 2, 2, 2 * TOKENS)


def test_learner_snapshot_that_does_not_overlap_survives_any_change_of_the_parameters():
    desk = Desk("sync.overlap_snapshots=false")
    r = desk.ask()
    desk.box.turns(8)
    desk.step()
    with torch.no_grad():
        desk.model.w[0].fill_(100)  # averaged weights put in for an evaluation, say
    assert content(desk.contribution(r)) == (LR, 0, 1, 1, TOKENS)


def test_learner_says_so_once_and_stops_to_overlap_when_something_else_changes_parameters(
    caplog: pytest.LogCaptureFixture,
):
    desk = Desk()
    for number in range(3):
        r = desk.ask()
        desk.box.turns(8)
        desk.step()
        with torch.no_grad():
            desk.model.w[0].fill_(100 + number)
        desk.step()
        if number:  # copied at once by now
            assert content(desk.contribution(r))[0] != 8 - (100 + number)
        desk.box.port.ask(0, 0)
        desk.box.port.resolve(0, r, NOT_MERGED)
        desk.train()
    (warning,) = [m for m in caplog.messages if "must not change" in m]
    assert "sync.overlap_snapshots=false" in warning
    assert not desk.learner._exchange.copies_later


class Wrapper(torch.optim.Optimizer):
    """One of torch's by name: it never calls its parent's constructor, so that no hook of it is ever run."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        self._inner = torch.optim.SGD(parameters, lr=lr)
        self._optimizer_step_pre_hooks = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def step(self) -> None:
        self._inner.step()


class Bare(Wrapper):
    """The same without a place for hooks."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, lr)
        del self._optimizer_step_pre_hooks


@pytest.mark.parametrize("optimizer", [Wrapper, Bare])
def test_learner_whose_optimizer_runs_no_hooks_copies_at_once(optimizer: Any):
    desk = Desk(optimizer=optimizer)
    desk.train()
    r = desk.ask()
    desk.box.turns(8)
    desk.step()
    desk.step()
    assert content(desk.contribution(r)) == (2 * LR, 0, 2, 2, 2 * TOKENS)


def test_learner_that_missed_the_end_says_that_its_model_is_not_the_final_one(caplog: pytest.LogCaptureFixture):
    desk = Desk()
    desk.train()
    desk.box.beat(phase=FINISHED_WITHOUT)
    desk.box.couriers[0].start()
    desk.learner.close()
    assert "its model is not the final one" in caplog.text
    assert desk.left == [(0, True)], "and leaves MPI as after a loss"


def test_learner_whose_optimizer_has_not_all_parameters_copies_at_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    desk = Desk(fragments=2, optimizer=lambda parameters, lr: torch.optim.SGD(list(parameters)[:1], lr=lr))
    assert not desk.learner._exchange.copies_later
    assert "not all parameters are the attached optimizer's" in caplog.text


@pytest.mark.parametrize("receipt", ["replace", "rebase"])
def test_learner_closes_with_the_global_model_also_when_its_last_contribution_was_refused(receipt: str):
    desk = Desk(f"sync.receipt={receipt}")
    desk.publish(1, 5.0)
    desk.train(3)
    assert desk.weight != 5.0
    desk.box.beat(phase=FINISHED)
    desk.box.couriers[0].start()
    desk.learner.close()
    assert desk.weight == 5.0
