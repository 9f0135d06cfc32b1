"""A learner at a desk: real Learner, courier and port over local memory, with the test in the syncer's place.

Here: one learner of one rank, and one of two ranks in two threads. Not here: the window and the group (local_link.py).
The model has weights with a constant gradient of 1 (of Twins rank r has the gradient r, the mean is 0.5) under
SGD with learning rate 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_link import RUN_TOKEN, Mailbox, Meeting

from pyddl.config import load_config
from pyddl.core.kernels import decode_bf16, encode_bf16
from pyddl.core.layout import build_layout
from pyddl.link.mailbox import pack
from pyddl.link.port import Contribution
from pyddl.run.exchange import Link
from pyddl.run.learner import Learner
from pyddl.run.replica import Replica, tensor_specs
from pyddl.store.trace import Trace

LR = 0.5
TOKENS = 10


class Weights(torch.nn.Module):
    """One scalar weight per fragment."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor([8.0])) for _ in range(num))


class Desk:
    """One learner and, on the other side of its mailbox, the test in the syncer's place."""

    def __init__(
        self,
        *settings: str,
        fragments: int = 1,
        slots: int = 2,
        receipts: Path | None = None,
        step: int = 0,
        optimizer: Callable[..., Any] = torch.optim.SGD,
    ) -> None:
        self.config, _ = load_config(None, settings)
        self.model = Weights(fragments)
        self.optimizer = optimizer(self.model.parameters(), lr=LR)
        specs = tensor_specs(self.model)
        layout = build_layout(specs, num_fragments=fragments, policy="tensor")
        self.fragment_of = {f.segments[0].tensor: p for p, f in enumerate(layout.fragments)}
        self.box = Mailbox(num_slots=slots, wire=self.config.sync.wire, layout=layout, num_tests=0)
        replica = Replica(self.model, layout)
        anchors = []
        for p in range(fragments):
            floats = self.box.pool.take(1)
            replica.copy_out(p, floats)
            anchors.append(floats)
        self.left: list[tuple[int, bool]] = []
        self.saved = 0
        link = Link(
            self.box.couriers[0], self.box.pool, self.box.geometry, layout, self.box.groups[0], RUN_TOKEN, 1,
            versions=[0] * fragments, anchors=anchors, step=step, tokens=0,
            leave=lambda code, lost: self.left.append((code, lost)),
        )  # fmt: skip
        self.learner = Learner(
            self.config, self.model, self.optimizer, replica, link,
            learner_id=3, num_learners=4, num_ranks=1, receipts=Trace(receipts), save=self._save,
        )  # fmt: skip
        self.next_round = 1
        self.box.beat()

    def _save(self, learner: Learner) -> None:
        self.saved += 1

    @property
    def weights(self) -> list[float]:
        """By fragment."""
        values = [w.item() for w in self.model.w]
        return [values[t] for t, _ in sorted(self.fragment_of.items(), key=lambda item: item[1])]

    @property
    def weight(self) -> float:
        return self.weights[0]

    def train(self, steps: int = 1, tokens: int = TOKENS) -> None:
        """Steps with the gradient 1; before each, the link thread gets its turns."""
        for _ in range(steps):
            self.box.turns(8)
            self.step(tokens)
        self.box.turns(16)

    def step(self, tokens: int = TOKENS) -> None:
        """One step, the link thread getting no turn."""
        for w in self.model.w:
            w.grad = torch.ones(1)
        self.optimizer.step()
        self.learner.step(tokens=tokens, loss=torch.tensor(1.0))

    def ask(self, fragment: int = 0, base: int = 0, line: int = 0, round_id: int | None = None) -> int:
        if round_id is None:
            round_id, self.next_round = self.next_round, self.next_round + 1
        self.box.port.ask(line, pack(round_id, fragment, base))
        return round_id

    def look(self) -> tuple[dict[int, bool], dict[int, Contribution]]:
        """New answers (round -> declined) and complete contributions (round -> content)."""
        self.box.turns(30)
        reading = self.box.port.read()
        if reading is None:
            return {}, {}
        answers = {round_id: declined for _, round_id, declined in reading.answers}
        return answers, {r: self.box.port.verify(line, r) for line, r in reading.commits}

    def contribution(self, round_id: int) -> Contribution:
        answers, complete = self.look()
        assert answers == {round_id: False}
        assert set(complete) == {round_id}
        return complete[round_id]

    def nothing(self) -> bool:
        answers, complete = self.look()
        return not answers and not complete

    def publish(self, version: int, value: float, *, fragment: int = 0, step: int = 0, contains: int | None = None):
        floats = np.array([value], dtype=np.float32)
        if self.config.sync.wire == "bf16":
            floats, wire = np.empty(1, dtype=np.uint16), floats
            encode_bf16(wire, None, floats)
        self.box.publish(fragment, version, floats, step=step, contains=contains)
        self.box.turns(30)
        self.box.pump()


def content(contribution: Contribution) -> tuple[float, int, int, int, int]:
    """Outer gradient, base version, clock step, c_steps, c_tokens."""
    h = contribution.header
    floats = contribution.floats
    if floats.dtype == np.uint16:
        floats = np.empty(len(contribution.floats), dtype=np.float32)
        decode_bf16(contribution.floats, floats)
    return float(floats[0]), h.base_version, h.step, h.c_steps, h.c_tokens


class Twins:
    """A learner of two ranks, each in a thread of its own, over one mailbox."""

    def __init__(self, *settings: str) -> None:
        config, _ = load_config(None, settings)
        self.models = [torch.nn.Linear(8, 4, bias=False) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in self.models]
        specs = tensor_specs(self.models[0])
        layout = build_layout(specs, num_fragments=1)
        self.box = Mailbox(num_ranks=2, layout=layout, num_tests=0)
        self.groups = Meeting(2).groups(timeout_s=5.0)
        self.learners = []
        self.left: list[tuple[int, int, bool]] = []
        for rank, model in enumerate(self.models):
            torch.nn.init.constant_(model.weight, 1.0)
            anchor = np.ones(32, dtype=np.float32)
            link = Link(
                self.box.couriers[rank], self.box.pool, self.box.geometry, layout, self.groups[rank], RUN_TOKEN, 1,
                versions=[0], anchors=[anchor], step=0, tokens=0,
                leave=lambda code, lost, rank=rank: self.left.append((rank, code, lost)),
            )  # fmt: skip
            self.learners.append(
                Learner(
                    config, model, self.optimizers[rank], Replica(model, layout), link,
                    learner_id=0, num_learners=1, num_ranks=2, receipts=Trace(None), save=lambda who: None,
                )
            )  # fmt: skip
        self.pool = ThreadPoolExecutor(2)
        self.box.beat()
        self.box.turns(8)

    def step(self, rank: int, tokens: int) -> None:
        """The gradient of rank r is r, so their mean is 0.5."""
        weight = self.models[rank].weight
        (weight * float(rank)).sum().backward()
        self.learners[rank].average_gradients()
        self.optimizers[rank].step()
        self.optimizers[rank].zero_grad()
        self.learners[rank].step(tokens=tokens)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.box.turns(6)
            for future in [self.pool.submit(self.step, rank, 10 + rank) for rank in range(2)]:
                future.result(20)
        self.box.turns(16)

    def values(self) -> list[float]:
        (first,) = {v for v in self.models[0].weight.flatten().tolist()}
        (second,) = {v for v in self.models[1].weight.flatten().tolist()}
        return [first, second]
