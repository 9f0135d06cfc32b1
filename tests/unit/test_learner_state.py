"""A learner's own state through its file: what comes back, and that nothing in it is pickled."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch

from pyddl.run import learner_state
from pyddl.run.learner_state import load_learner, save_learner
from pyddl.run.shards import Shard


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)).to(dtype)


def learner(
    optimizer: torch.optim.Optimizer, *, learner_id: int = 1, rank: int = 0, shards: Any = (), step: int = 9
) -> Any:
    """As much of a Learner as its state is made of."""
    this = SimpleNamespace(
        learner_id=learner_id,
        rank=rank,
        num_steps=7,
        step_count=step,
        tokens=70,
        shards=list(shards),
        optimizer=optimizer,
    )
    this.cursors = None
    this.resume_cursors = lambda cursors: setattr(this, "cursors", cursors)
    return this


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 6, generator=generator).to(next(net.parameters()).dtype)
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_amsgrad_two_groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 0.01}, {"params": p[2:], "lr": 0.1, "betas": (0.5, 0.9)}], amsgrad=True
    ),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learner_state_optimizer_goes_on_as_if_never_interrupted(name: str, dtype: torch.dtype, tmp_path: Path):
    whole = model(dtype)
    optimizer = OPTIMIZERS[name](list(whole.parameters()))
    train(whole, optimizer, 4, seed=1)
    save_learner(tmp_path, learner(optimizer))
    parted = model(dtype)
    parted.load_state_dict(whole.state_dict())
    other = OPTIMIZERS[name](list(parted.parameters()))
    load_learner(tmp_path, learner(other))
    for net, opt in ((whole, optimizer), (parted, other)):
        train(net, opt, 3, seed=2)
    for a, b in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(a, b)
    mine, wanted = other.state_dict(), optimizer.state_dict()
    assert mine["param_groups"] == wanted["param_groups"]
    assert mine["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        for field, value in state.items():
            if isinstance(value, torch.Tensor):
                assert mine["state"][key][field].dtype == value.dtype
                assert mine["state"][key][field].shape == value.shape


def test_learner_state_file_holds_no_pickle(tmp_path: Path):
    """Checkpoints travel between people: reading one must not run code."""
    net = model()
    optimizer = OPTIMIZERS["adamw"](list(net.parameters()))
    train(net, optimizer, 1, seed=1)
    save_learner(tmp_path, learner(optimizer, shards=[Shard(range(9), index=0, count=1, seed=0, endless=True)]))
    raw = (tmp_path / "learner-1.h5").read_bytes()
    assert not any(sign in raw for sign in (b"\x80\x02}", b"\x80\x03}", b"\x80\x04\x95", b"\x80\x05\x95"))
    assert b"torch._utils" not in raw
    kinds = []
    with h5py.File(tmp_path / "learner-1.h5") as file:
        file.visititems(lambda _, item: kinds.append(item.dtype.kind) if isinstance(item, h5py.Dataset) else None)
    assert kinds
    assert set(kinds) <= set("fiub"), "numbers only: no objects"


def test_learner_state_random_numbers_and_cursors_come_back(tmp_path: Path):
    shards = [Shard(range(9), index=0, count=2, seed=0, endless=True) for _ in range(2)]
    for shard, number in zip(shards, (2, 7), strict=True):
        items = iter(shard)
        for _ in range(number):
            next(items)
    optimizer = OPTIMIZERS["sgd_plain"](list(model().parameters()))
    torch.manual_seed(99)
    torch.rand(5)
    save_learner(tmp_path, learner(optimizer, shards=shards))
    wanted = torch.rand(3)
    torch.manual_seed(0)
    who = learner(optimizer)
    load_learner(tmp_path, who)
    assert torch.equal(torch.rand(3), wanted)
    assert who.cursors == [shard.state_dict() for shard in shards]


def test_learner_state_of_a_group_is_rank_0s_optimizer_and_each_ranks_own_cursor(tmp_path: Path):
    net = model()
    optimizer = OPTIMIZERS["sgd_momentum"](list(net.parameters()))
    train(net, optimizer, 2, seed=1)
    for rank in (0, 1):
        shard = Shard(range(90), index=rank, count=2, seed=0, endless=True)
        items = iter(shard)
        for _ in range(3 + rank):
            next(items)
        save_learner(tmp_path, learner(optimizer, rank=rank, shards=[shard]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner-1-rank1.h5", "learner-1.h5"]
    other = OPTIMIZERS["sgd_momentum"](list(net.parameters()))
    who = learner(other, rank=1)
    load_learner(tmp_path, who)
    assert who.cursors == [{"epoch": 0, "position": 4}]
    buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(other.state_dict()["state"][0]["momentum_buffer"], buffer)


def test_learner_state_without_a_folder_is_not_written():
    save_learner(None, learner(OPTIMIZERS["sgd_plain"](list(model().parameters()))))


def test_learner_state_that_is_missing_starts_fresh_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    optimizer = OPTIMIZERS["sgd_momentum"](list(model().parameters()))
    who = learner(optimizer)
    with caplog.at_level(logging.WARNING):
        load_learner(tmp_path, who)
    assert "learner 1 starts with a fresh inner optimizer" in caplog.text
    assert who.cursors is None
    assert optimizer.state_dict()["state"] == {}


def test_learner_state_that_is_damaged_starts_fresh_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    net = model()
    optimizer = OPTIMIZERS["sgd_momentum"](list(net.parameters()))
    train(net, optimizer, 1, seed=1)
    save_learner(tmp_path, learner(optimizer))
    path = tmp_path / "learner-1.h5"
    raw = bytearray(path.read_bytes())
    path.write_bytes(raw[: len(raw) // 2])
    fresh = OPTIMIZERS["sgd_momentum"](list(net.parameters()))
    load_learner(tmp_path, learner(fresh))
    assert "fresh inner optimizer" in caplog.text
    assert fresh.state_dict()["state"] == {}


def linears(*shapes: tuple[int, int]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def trained(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


A, B = (2, 3), (4, 1)
UNFIT = {
    "fewer parameters": (lambda: torch.optim.AdamW(linears(A)), "groups of 1 .* AdamW with 2"),
    "another shape": (lambda: torch.optim.AdamW(linears(A, (1, 4))), "groups of 2 .* AdamW with 2 of other shapes"),
    "another order": (lambda: torch.optim.AdamW(linears(B, A)), "of other shapes"),
    "other groups": (
        lambda: torch.optim.AdamW([{"params": linears(A)}, {"params": linears(B)}]), r"groups of 1 \+ 1 .* with 2"
    ),
    "another kind": (lambda: torch.optim.SGD(linears(A, B), momentum=0.9), "is a SGD .* saved one a AdamW"),
    "a buffer more": (lambda: torch.optim.AdamW(linears(A, B), amsgrad=True), "amsgrad=True needs the state of one"),
}  # fmt: skip


@pytest.mark.parametrize("change", UNFIT)
def test_learner_state_that_does_not_fit_the_optimizer_leaves_it_fresh_and_the_data_go_on(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Moments of another shape, or none where the optimizer looks for them, would be an error in the first step."""
    shard = Shard(range(9), index=0, count=1, seed=0, endless=True)
    next(iter(shard))
    save_learner(tmp_path, learner(trained(torch.optim.AdamW(linears(A, B))), shards=[shard]))
    make, words = UNFIT[change]
    optimizer = make()
    who = learner(optimizer)
    load_learner(tmp_path, who)
    (warning,) = caplog.messages
    assert re.search(words, warning)
    assert "learner 1 starts with a fresh inner optimizer" in warning
    assert optimizer.state_dict()["state"] == {}
    assert who.cursors == [{"epoch": 0, "position": 1}]
    trained(optimizer)


def test_learner_state_resumed_with_other_settings_obeys_them_and_keeps_the_moments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """``lm.weight_decay=0`` on resume must do something; so must a learning rate."""
    before = trained(torch.optim.AdamW([{"params": linears(A)}, {"params": linears(B), "weight_decay": 0.5}], lr=0.1))
    save_learner(tmp_path, learner(before))
    after = torch.optim.AdamW([{"params": linears(A), "betas": (0.5, 0.6)}, {"params": linears(B)}], lr=0.3)
    after.param_groups[0]["initial_lr"] = 0.7  # a scheduler's
    for group in after.param_groups:
        group["weight_decay"] = 0.0
    load_learner(tmp_path, learner(after))
    assert not caplog.messages
    assert [g["weight_decay"] for g in after.param_groups] == [0.0, 0.0]
    assert [g["lr"] for g in after.param_groups] == [0.3, 0.3]
    assert after.param_groups[0]["betas"] == (0.5, 0.6)
    assert after.param_groups[0]["initial_lr"] == 0.7
    for mine, wanted in zip(after.state_dict()["state"].values(), before.state_dict()["state"].values(), strict=True):
        assert mine["step"] == wanted["step"] == 1
        assert torch.equal(mine["exp_avg"], wanted["exp_avg"])
    assert [g["params"][0].shape for g in after.param_groups] == [A, B], "the parameters are the new model's"


@pytest.mark.parametrize(("step", "is_stale"), [(9, False), (1, False), (17, False), (18, True), (500, True)])
def test_learner_state_older_than_the_run_is_named_and_taken(
    step: int, is_stale: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A run that crashed long after its learner had saved: written at step 9, the run goes on at ``step``."""
    shard = Shard(range(9), index=0, count=1, seed=0, endless=True)
    next(iter(shard))
    save_learner(tmp_path, learner(trained(torch.optim.AdamW(linears(A))), shards=[shard]))
    optimizer = torch.optim.AdamW(linears(A))
    who = learner(optimizer, step=step)
    load_learner(tmp_path, who)
    assert len(caplog.messages) == is_stale
    if is_stale:
        assert f"learner-1.h5 should be of the step at which the run goes on, {step}; it is of step 9" in caplog.text
        assert f"the optimizer's moments, the place in the data and the random numbers are {step - 9} steps old" in (
            caplog.text
        )
    assert len(optimizer.state_dict()["state"]) == 1
    assert who.cursors == [{"epoch": 0, "position": 1}]


def test_learner_state_of_a_rank_older_than_the_run_names_the_ranks_own_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    optimizer = torch.optim.AdamW(linears(A))
    for rank in (0, 1):
        save_learner(tmp_path, learner(optimizer, rank=rank))
    load_learner(tmp_path, learner(optimizer, rank=1, step=100))
    (warning,) = caplog.messages
    assert "learner-1-rank1.h5" in warning
    assert "this rank's place in the data and its random numbers are 91 steps old" in warning


def test_learner_state_that_lacks_a_ranks_file_keeps_the_optimizer_and_says_what_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_learner(tmp_path, learner(trained(torch.optim.AdamW(linears(A)))))
    optimizer = torch.optim.AdamW(linears(A))
    who = learner(optimizer, rank=1)
    load_learner(tmp_path, who)
    (warning,) = caplog.messages
    assert "learner-1-rank1.h5" in warning
    assert "rank 1 of learner 1 begins its data anew" in warning
    assert "fresh inner optimizer" not in warning
    assert len(optimizer.state_dict()["state"]) == 1
    assert who.cursors is None, "not rank 0's"


def test_learner_state_that_lacks_rank_0s_file_keeps_the_ranks_own_cursor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shard = Shard(range(9), index=1, count=2, seed=0, endless=True)
    next(iter(shard))
    optimizer = torch.optim.AdamW(linears(A))
    save_learner(tmp_path, learner(optimizer, rank=1, shards=[shard]))
    who = learner(optimizer, rank=1)
    load_learner(tmp_path, who)
    (warning,) = caplog.messages
    assert "fresh inner optimizer" in warning
    assert who.cursors == [{"epoch": 0, "position": 1}]


def test_learner_state_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    optimizer = OPTIMIZERS["sgd_plain"](list(model().parameters()))
    save_learner(tmp_path / "no" / "such" / "folder", learner(optimizer))
    assert "the learner's optimizer state is not saved" in caplog.text


class Odd(torch.optim.SGD):
    """An optimizer that keeps what JSON cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "odd": object()}


def test_learner_state_that_cannot_be_expressed_is_a_warning_and_not_the_end_of_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_learner(tmp_path, learner(Odd(model().parameters(), lr=0.1)))
    assert "the learner's optimizer state is not saved" in caplog.text


def test_save_beside_training_writes_what_was_there_at_the_boundary(tmp_path: Path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer, 2, 0)
    wanted = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    save_learner(tmp_path, learner(optimizer), beside=True)
    for state in optimizer.state.values():
        state["momentum_buffer"].add_(100.0)  # the next step, made while the file is being written
    deadline_s = time.monotonic() + 20
    while not (tmp_path / "learner-1.h5").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    load_learner(tmp_path, learner(optimizer))
    for state, was in zip(optimizer.state.values(), wanted, strict=True):
        assert torch.equal(state["momentum_buffer"], was)


def test_learner_state_of_an_optimizer_that_has_none_keeps_the_data_and_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shard = Shard(range(9), index=0, count=1, seed=0, endless=True)
    next(iter(shard))
    save_learner(tmp_path, learner(object(), shards=[shard]))
    assert "the learner's optimizer state is not saved" in caplog.text
    who = learner(OPTIMIZERS["sgd_plain"](list(model().parameters())))
    load_learner(tmp_path, who)
    assert "could not be written" in caplog.text
    assert who.cursors == [{"epoch": 0, "position": 1}]


class HungDisk:
    """In the place of the write to a file system that has stopped to answer, until it is told to go on."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def __call__(self, path: Path, arrays: Any, meta: Any) -> None:
        self.answers.wait(30)


@pytest.mark.parametrize("beside_first", [False, True])
def test_learner_state_on_a_file_system_that_hangs_is_given_up_with_a_warning(
    beside_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    disk = HungDisk()
    monkeypatch.setattr(learner_state, "write_learner_state", disk)
    who = learner(OPTIMIZERS["sgd_plain"](list(model().parameters())))
    started_s = time.monotonic()
    if beside_first:
        save_learner(tmp_path, who, beside=True)
    save_learner(tmp_path, who, limit_s=0.2)
    assert time.monotonic() - started_s < 10
    (warning,) = caplog.messages
    assert "within 0 s (timeouts.save_s)" in warning
    assert "learner-1.h5" in warning
    disk.answers.set()
