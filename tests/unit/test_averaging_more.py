"""Gradients that are changed between backward and average_gradients(), and sums that cannot be started."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from local_link import LocalGroup, Meeting
from test_averaging import Ranks, net, passes

from pyddl.errors import TransportError
from pyddl.run.averaging import GradientAverager


def unscale(model: torch.nn.Module) -> None:
    """What GradScaler.unscale_ does."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor([0.25]))


def multiply(model: torch.nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.25)


def divide(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad /= 4


def exchange(model: torch.nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.25


def change_one(model: torch.nn.Module) -> None:
    first = next(iter(model.parameters()))
    assert first.grad is not None
    first.grad.detach()[0, 0] += 5


def change_data(model: torch.nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-0.01, 0.01)


def change_by_numpy(model: torch.nn.Module) -> None:
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad.numpy()[0] = 7


def drop_one(model: torch.nn.Module) -> None:
    next(iter(model.parameters())).grad = None


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def new_zero(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    "change",
    [multiply, divide, exchange, change_one, change_data, change_by_numpy, drop_one, clip, unscale, new_zero],
)
@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_averager_gradient_changed_after_backward_is_averaged_as_it_is_then(
    change: Callable[[torch.nn.Module], None], who: tuple[int, ...]
):
    """From the second step on the sums have started during the backward pass; one rank alone may change."""
    ranks = Ranks(net)
    for seed in range(4):

        def act(model: torch.nn.Module, rank: int, seed: int = seed) -> None:
            passes(model, rank, seed=seed)
            if rank in who:
                change(model)

        ranks.check(ranks.run(act))


def test_averager_gradients_changed_at_every_step_are_summed_twice_only_once():
    """A loop that divides its gradients does so at every step: its later sums wait for average()."""
    ranks = Ranks(net)
    num_buckets = len(ranks.averagers[0]._buckets)
    sums = []
    for _ in range(5):
        before = len(ranks.groups[0].record)
        ranks.run(lambda model, rank: (passes(model, rank), divide(model)))
        sums.append(len(ranks.groups[0].record) - before)
    assert sums == [num_buckets + 1, 2 * num_buckets + 1, *[num_buckets + 1] * 3]


def test_averager_accumulation_that_changes_once_does_not_end_the_overlap():
    ranks = Ranks(net)
    num_buckets = len(ranks.averagers[0]._buckets)
    early = 0

    def act(model: torch.nn.Module, rank: int, times: int) -> None:
        nonlocal early
        before = len(ranks.groups[0].record)
        passes(model, rank, times)
        if rank == 0:
            early = len(ranks.groups[0].record) - before

    for times in (1, 2, 1, 1):
        ranks.run(lambda model, rank, times=times: act(model, rank, times))
    assert early == num_buckets


def test_averager_untouched_gradients_are_summed_once():
    ranks = Ranks(net)
    num_buckets = len(ranks.averagers[0]._buckets)
    for _ in range(4):
        ranks.run(passes)
    assert len(ranks.groups[0].record) == 4 * (num_buckets + 1)


def test_averager_sum_that_cannot_start_during_backward_is_an_error_of_average():
    """In a hook nobody catches it: backward() would end with MPI's sentence instead of ending the learner in order."""
    group = LocalGroup(Meeting(1), 0, 1.0)
    model = net()
    averager = GradientAverager(list(model.parameters()), group, 100)
    passes(model, 0)
    averager.average()

    def refuse(array: object) -> None:
        raise TransportError("a rank of its learner is gone")

    group.sum = refuse  # type: ignore[assignment, method-assign]
    passes(model, 0)
    for _ in range(2):
        with pytest.raises(TransportError, match="is gone"):
            averager.average()
