"""Gradients of two and three ranks, each in a thread, with real sums: the mean, whatever accumulates."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from local_link import LocalGroup, Meeting

from pyddl.errors import TransportError
from pyddl.run.averaging import GradientAverager


class Ranks:
    """The same model on each rank, with a GradientAverager; every call runs on all ranks at once."""

    def __init__(self, make: Callable[[], torch.nn.Module], size: int = 2, bucket_bytes: int = 100) -> None:
        self.groups = Meeting(size).groups()
        self.models = []
        for _ in range(size):
            torch.manual_seed(1)
            self.models.append(make())
        self.averagers = [
            GradientAverager(list(model.parameters()), group, bucket_bytes)
            for model, group in zip(self.models, self.groups, strict=True)
        ]
        self._pool = ThreadPoolExecutor(size)

    def run(self, act: Callable[[torch.nn.Module, int], Any]) -> list[list[torch.Tensor | None]]:
        """One step: ``act`` makes the gradients of a rank, then they are averaged. Returns what they were before."""
        before: list[list[torch.Tensor | None]] = [[] for _ in self.models]

        def rank(number: int) -> None:
            model = self.models[number]
            for p in model.parameters():
                p.grad = None
            act(model, number)
            before[number] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            self.averagers[number].average()

        for future in [self._pool.submit(rank, number) for number in range(len(self.models))]:
            future.result(20)
        records = [group.record for group in self.groups]
        assert all(record == records[0] for record in records), "the same sums in the same order on every rank"
        return before

    def check(self, before: list[list[torch.Tensor | None]]) -> None:
        for i, parameters in enumerate(zip(*(m.parameters() for m in self.models), strict=True)):
            grads = [b[i] for b in before]
            if all(g is None for g in grads):
                assert all(p.grad is None for p in parameters)
                continue
            zero = torch.zeros_like(parameters[0], dtype=torch.float32)
            mean = sum((zero if g is None else g.float() for g in grads), zero) / len(grads)
            for p in parameters:
                assert p.grad is not None
                assert p.grad.dtype == p.dtype
                torch.testing.assert_close(p.grad.float(), mean.to(p.dtype).float(), rtol=1e-6, atol=1e-7)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))


def passes(model: torch.nn.Module, rank: int, times: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(times):
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_averager_gradients_are_the_mean_over_the_ranks(size: int, bucket_bytes: int):
    ranks = Ranks(net, size, bucket_bytes)
    for seed in range(4):
        ranks.check(ranks.run(lambda model, rank, seed=seed: passes(model, rank, seed=seed)))


def test_averager_buckets_start_during_the_backward_pass_once_the_counts_are_learnt():
    ranks = Ranks(net)
    started: list[int] = []

    def act(model: torch.nn.Module, rank: int) -> None:
        passes(model, rank)
        if rank == 0:
            started.append(len(ranks.groups[0].record))

    for _ in range(2):
        ranks.run(act)
    num_buckets = len(ranks.averagers[0]._buckets)
    assert num_buckets > 2
    assert started == [0, num_buckets + 1 + num_buckets]


@pytest.mark.parametrize(
    "counts",
    [
        [(1, 1), (3, 3), (3, 3), (1, 1), (2, 2)],  # all ranks accumulate more, then less often
        [(1, 1), (2, 1), (1, 2), (1, 1), (4, 1)],  # one rank alone does
        [(2, 1), (2, 1), (1, 2), (2, 2)],
        [(1, 1), (0, 1), (1, 1), (0, 0), (1, 1)],  # a rank has no gradient at all
    ],
)
def test_averager_accumulation_that_changes_from_step_to_step_is_still_the_mean(counts: list[tuple[int, int]]):
    ranks = Ranks(net)
    for seed, times in enumerate(counts):
        ranks.check(ranks.run(lambda model, rank, seed=seed, times=times: passes(model, rank, times[rank], seed)))


class Branches(torch.nn.Module):
    """Uses one branch or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(x).square().sum()


def test_averager_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others():
    ranks = Ranks(Branches)
    for branches in ("ab", "ba", "aa", "bb", "ab"):

        def act(model: torch.nn.Module, rank: int, branches: str = branches) -> None:
            model(torch.full((2, 4), 1.0 + rank), branches[rank]).backward()

        ranks.check(ranks.run(act))


def test_averager_parameter_that_no_rank_uses_keeps_no_gradient():
    """A gradient of zeros would let AdamW decay it: two ranks would train another model than one."""
    ranks = Ranks(Branches)
    for _ in range(2):
        ranks.run(lambda model, rank: model(torch.ones(2, 4), "a").backward())
        for model in ranks.models:
            assert model.never.weight.grad is None
            assert model.b.weight.grad is None
            assert model.a.weight.grad is not None


def test_averager_branch_used_twice_while_another_is_left_out_is_not_taken_for_complete():
    """The counts of a bucket are sums over its parameters: 2 + 0 looks like 1 + 1."""
    ranks = Ranks(Branches, bucket_bytes=1 << 20)

    def both(model: torch.nn.Module, rank: int) -> None:
        (model(torch.ones(2, 4), "a") + model(torch.ones(2, 4), "b")).backward()

    def one_twice(model: torch.nn.Module, rank: int) -> None:
        for branch in ("aa", "ab")[rank]:
            model(torch.full((2, 4), 3.0), branch).backward()

    for act in (both, one_twice, both, one_twice):
        ranks.check(ranks.run(act))


def test_averager_bf16_gradients_are_summed_in_float32():
    ranks = Ranks(lambda: net().bfloat16(), size=3)
    for seed in range(3):

        def act(model: torch.nn.Module, rank: int, seed: int = seed) -> None:
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed + 7 * rank)).bfloat16()
            model(x).square().sum().backward()

        ranks.check(ranks.run(act))


def test_averager_shared_parameter_is_averaged_once():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.two = torch.nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    ranks = Ranks(Tied)
    for seed in range(3):
        ranks.check(ranks.run(lambda model, rank, seed=seed: passes(model, rank, seed=seed)))


def test_averager_transposed_parameter_keeps_its_elements_in_place():
    class Transposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 3).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :3] @ self.w

    ranks = Ranks(Transposed)
    for seed in range(3):
        ranks.check(ranks.run(lambda model, rank, seed=seed: passes(model, rank, seed=seed)))


def test_averager_closed_takes_part_in_no_further_sum():
    ranks = Ranks(net)
    ranks.run(lambda model, rank: passes(model, rank))
    for averager in ranks.averagers:
        averager.close()
    before = len(ranks.groups[0].record)
    passes(ranks.models[0], 0)
    assert len(ranks.groups[0].record) == before


def test_averager_mate_that_does_not_come_is_an_error_that_names_the_wait():
    group = LocalGroup(Meeting(2), 0, timeout_s=0.05)
    model = net()
    averager = GradientAverager(list(model.parameters()), group)
    passes(model, 0)
    with pytest.raises(TransportError, match="gradient bucket 0"):
        averager.average()
