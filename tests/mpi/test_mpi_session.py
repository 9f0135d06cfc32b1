"""Whole runs in one MPI world: a model of one weight with constant gradients, and its trajectory computed by hand.

The weight starts at 8. Learner m has the gradient c_m and ``tokens`` n_m per step; inner SGD has the learning rate 1/2,
so in H = 4 steps it moves by 2 c_m, its outer gradient. In lock-step every learner stops at every H-th step until it
holds the merge, so weights in a merge are w_m = c_tokens * c_tokens / c_steps = H n_m^2, and nothing depends on time.
Run under mpiexec -n 2 to 4; rank 0 serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pyddl
from pyddl.errors import ConfigError, LayoutMismatch
from pyddl.store.checkpoint import Checkpoint, newest_good_checkpoint
from pyddl.store.trace import read_trace

START, LR, H, STEPS = 8.0, 0.5, 4, 12


class One(torch.nn.Module):
    """One weight, which several ranks or learners pull in their own directions."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([START]))


def join(**settings: dict[str, Any]) -> pyddl.Session | None:
    """pyddl.init() on a learner; on the syncer None, after the run."""
    code: object = None
    try:
        return pyddl.init(**settings)
    except SystemExit as ended:
        code = ended.code
    assert code == 0, "the syncer's exit status"
    return None


def run(
    folder: Path,
    gradient: Callable[[int, int], float],
    tokens: Callable[[int], int],
    *,
    sections: dict[str, dict[str, Any]],
    last_step: Callable[[int], int] = lambda m: 10**9,
    pause_s: float = 0.0,
    make: Callable[[], One] = One,
) -> tuple[list[float], float] | None:
    """One run. On learners: the weight after each step, and the one at the end; on the syncer: None."""
    settings = {s: dict(values) for s, values in sections.items()}
    settings.setdefault("run", {}).update(dir=str(folder))
    session = join(**settings)
    if session is None:
        return None
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    learner = session.attach(model, optimizer)
    path = []
    while learner.running and learner.num_steps < last_step(learner.learner_id):
        (model.w * gradient(learner.learner_id, learner.rank)).sum().backward()
        learner.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)
        learner.step(tokens=tokens(learner.learner_id), loss=1.0)
        path.append(model.w.item())
    learner.close()
    return path, model.w.item()


def lockstep(num_learners: int, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "run": {"max_steps": STEPS},
        "sync": {"quorum": num_learners, "interval": H, "lockstep_steps": 1000, "merge_rule": "mean"},
    }
    for name, values in more.items():
        sections.setdefault(name, {}).update(values)
    return sections


def path_between(merges: Sequence[float], gradient: float, steps: int = STEPS) -> list[float]:
    """The weight after each step, if version k of ``merges`` arrives at step k*H; the last merge is the drain."""
    path = []
    weight = START
    for step in range(1, steps + 1):
        weight -= LR * gradient
        if step % H == 0 and step < STEPS:
            weight = merges[step // H - 1]
        path.append(weight)
    return path


def final(folder: Path) -> Checkpoint:
    checkpoint, _, bad = newest_good_checkpoint(folder)
    assert bad == []
    return checkpoint


def tape(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_trace(folder / "events.jsonl") if line["kind"] == kind]


# Outer gradients of the learners are 2 * GRADIENTS, their weights in a merge as TOKENS squared.
GRADIENTS = (1.0, -6.0, 2.0)
TOKENS = (1, 2, 1)
# M: what the merge of all makes of them. mean: 2; (1*2 - 4*12)/5 = -9.2; (2 - 48 + 4)/6 = -7.
# RDA: the mean of the norms, in the direction of the mean of the signs: 2; -(2 + 48)/5; -(2 + 48 + 4)/6.
MERGED = {"mean": {1: 2.0, 2: -9.2, 3: -7.0}, "rda": {1: 2.0, 2: -10.0, 3: -9.0}}


def trajectory(merged: Sequence[float], optimizer: str, lr: float, mu: float) -> list[float]:
    """Theta after each merge. Nesterov: b <- mu b + d; Theta <- Theta - lr (d + mu b)."""
    theta, buffer, thetas = START, 0.0, []
    for d in merged:
        buffer = mu * buffer + d
        theta -= lr * (d + mu * buffer) if optimizer == "nesterov" else lr * d
        thetas.append(theta)
    return thetas


def test_trajectory_of_this_file_is_what_pen_and_paper_say():
    """The figures that the runs below are compared with, written out once."""
    assert trajectory([2, 2, 2], "sgd", 1.0, 0.9) == [6, 4, 2]
    # b = 2, 3, 3.5; Theta = 8 - (2+1)/2, - (2+1.5)/2, - (2+1.75)/2
    assert trajectory([2, 2, 2], "nesterov", 0.5, 0.5) == [6.5, 4.75, 2.875]
    assert path_between([6, 4, 2], 1.0) == [7.5, 7, 6.5, 6, 5.5, 5, 4.5, 4, 3.5, 3, 2.5, 2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rule", ["mean", "rda"])
@pytest.mark.parametrize(("optimizer", "lr", "mu"), [("sgd", 1.0, 0.9), ("nesterov", 0.5, 0.5)])
def test_run_in_lockstep_gives_the_trajectory_computed_by_hand(
    comm: Any, folder: Path, rule: str, optimizer: str, lr: float, mu: float
):
    m = comm.size - 1
    thetas = trajectory([MERGED[rule][m]] * 3, optimizer, lr, mu)
    sections = lockstep(m, sync={"merge_rule": rule}, outer={"optimizer": optimizer, "lr": lr, "momentum": mu})
    result = run(folder, lambda m, _rank: GRADIENTS[m], lambda m: TOKENS[m], sections=sections)
    if result is not None:
        path, last = result
        assert path == pytest.approx(path_between(thetas, GRADIENTS[comm.rank - 1]), rel=1e-6)
        assert last == pytest.approx(thetas[-1], rel=1e-6), "close() leaves the global model"
    comm.barrier()
    checkpoint = final(folder)
    (fragment,) = checkpoint.fragments
    assert (checkpoint.step, fragment.version) == (STEPS, 3)
    assert fragment.theta.tolist() == pytest.approx([thetas[-1]], rel=1e-6)
    if optimizer == "nesterov":
        d = MERGED[rule][m]
        assert fragment.momentum.tolist() == pytest.approx([d + d / 2 + d / 4], rel=1e-6)
    merges = tape(folder, "Merge")
    assert [x["version"] for x in merges] == [1, 2, 3]
    for merge in merges:
        assert [c["learner_id"] for c in merge["contributors"]] == list(range(m))
        assert [c["c_steps"] for c in merge["contributors"]] == [H] * m
        assert [c["weight"] for c in merge["contributors"]] == [H * n * n for n in TOKENS[:m]]
    tokens = STEPS * sum(TOKENS[:m])
    (end,) = tape(folder, "Result")
    assert end["tokens"] == {
        "processed": tokens, "proposed": tokens, "selected": tokens, "effective": tokens, "discarded": 0,
    }  # fmt: skip
    assert (end["rejected"], end["num_lost"], end["achieved_H"]) == ({}, 0, H)


@pytest.mark.mpi(min_size=3)
def test_run_of_one_learner_with_several_ranks_averages_their_gradients(comm: Any, folder: Path):
    """Rank g has the gradient 2 g, so their mean is G - 1, and the tokens are summed over the ranks."""
    ranks = comm.size - 1
    mean = ranks - 1.0
    thetas = trajectory([2 * mean] * 3, "sgd", 1.0, 0)
    sections = lockstep(1, run={"ranks": ranks, "max_steps": STEPS})
    result = run(folder, lambda _m, rank: 2.0 * rank, lambda m: 5, sections=sections)
    if result is not None:
        path, last = result
        assert path == pytest.approx(path_between(thetas, mean))
        assert last == thetas[-1]
    comm.barrier()
    for merge in tape(folder, "Merge"):
        (c,) = merge["contributors"]
        assert (c["c_steps"], c["c_tokens"]) == (H, H * 5 * ranks)
    assert final(folder).fragments[0].theta.tolist() == [thetas[-1]]


@pytest.mark.mpi(min_size=3)
def test_run_of_a_group_over_data_that_does_not_divide_ends_in_order(comm: Any):
    """One pass over 2 G + 1 items: every rank makes two steps. A third on rank 0 would meet close() on the others."""
    ranks = comm.size - 1
    session = join(run={"ranks": ranks}, sync={"interval": 2}, timeouts={"group_s": 20})
    if session is None:
        return
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    learner = session.attach(model, optimizer)
    seen = []
    for item in learner.shard(range(2 * ranks + 1)):
        seen.append(item)
        model.w.sum().backward()
        learner.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=1)
    learner.close()
    assert seen == [learner.rank, ranks + learner.rank]
    assert model.w.item() == START - 2 * LR


@pytest.mark.mpi(min_size=2)
def test_run_over_a_bf16_wire_is_exact_for_what_bf16_can_hold(comm: Any, folder: Path):
    m = comm.size - 1
    thetas = trajectory([2.0] * 3, "sgd", 1.0, 0)
    sections = lockstep(m, sync={"wire": "bf16"})
    result = run(folder, lambda m, _rank: 1.0, lambda m: 3, sections=sections)
    if result is not None:
        assert result == (path_between(thetas, 1.0), thetas[-1])
    comm.barrier()
    assert final(folder).fragments[0].theta.tolist() == [2.0]


@pytest.mark.mpi(min_size=3)
def test_run_that_a_learner_leaves_early_goes_on_with_the_others(comm: Any, folder: Path):
    """The last learner closes after its first receipt, at step 4, with nothing new to give: it declines from then on.
    Mean, M = 2: 8 + 9.2, then learner 0 alone: - 2 twice. M = 3: 8 + 7; then learners 0 and 1, weights 1 : 4, twice
    + 9.2."""
    m = comm.size - 1
    merged = [MERGED["mean"][m], MERGED["mean"][m - 1], MERGED["mean"][m - 1]]
    thetas = trajectory(merged, "sgd", 1.0, 0)
    leaver = m - 1
    result = run(
        folder, lambda m, _rank: GRADIENTS[m], lambda m: TOKENS[m], sections=lockstep(m),
        last_step=lambda m: H if m == leaver else 10**9,
    )  # fmt: skip
    if result is not None:
        path, last = result
        steps = H if comm.rank - 1 == leaver else STEPS
        assert path == pytest.approx(path_between(thetas, GRADIENTS[comm.rank - 1], steps), rel=1e-6)
        assert last == pytest.approx(thetas[-1], rel=1e-6), "it waits for the end and takes the global model"
    comm.barrier()
    assert [len(x["contributors"]) for x in tape(folder, "Merge")] == [m, m - 1, m - 1]
    assert final(folder).fragments[0].theta.tolist() == pytest.approx([thetas[-1]], rel=1e-6)


@pytest.mark.mpi(min_size=2)
def test_run_resumed_goes_on_as_if_never_interrupted(comm: Any, folder: Path):
    """Nesterov's buffer, versions, ledger and clock come from the checkpoint: 12 steps, then up to 24 in another world.
    The interrupted run has its drain at 12, where the other one has an ordinary merge."""
    m = comm.size - 1
    outer = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
    thetas = trajectory([MERGED["mean"][m]] * 6, "nesterov", 0.5, 0.5)
    first = lockstep(m, outer=outer, run={"max_steps": STEPS})
    run(folder, lambda m, _rank: GRADIENTS[m], lambda m: TOKENS[m], sections=first)
    comm.barrier()
    assert final(folder).fragments[0].theta.tolist() == pytest.approx([thetas[2]], rel=1e-6)
    comm.barrier()
    second = lockstep(m, outer=outer, run={"max_steps": 2 * STEPS, "resume": True})
    result = run(folder, lambda m, _rank: GRADIENTS[m], lambda m: TOKENS[m], sections=second)
    if result is not None:
        path, last = result
        assert len(path) == STEPS, "the clock went on at 12"
        assert path[0] == pytest.approx(thetas[2] - LR * GRADIENTS[comm.rank - 1], rel=1e-6), "from the global model"
        assert last == pytest.approx(thetas[5], rel=1e-6)
    comm.barrier()
    checkpoint = final(folder)
    assert (checkpoint.step, checkpoint.fragments[0].version) == (2 * STEPS, 6)
    ledger = tape(folder, "Result")[-1]["tokens"]
    assert ledger["effective"] == ledger["processed"] == 2 * STEPS * sum(TOKENS[:m])


# ---------------------------------------------------------------- nobody waits: what holds whatever the timing


@pytest.mark.mpi(min_size=2)
def test_run_of_one_learner_with_rebase_loses_no_step_whatever_the_timing(comm: Any, folder: Path):
    """Outer SGD with learning rate 1: Theta moves by exactly what was pushed, and rebase keeps what was not."""
    if comm.size > 2:
        pytest.skip("one learner of one rank")
    sections = {
        "run": {"max_steps": 200},
        "sync": {"interval": 4, "receipt": "rebase", "merge_rule": "rda"},
    }
    result = run(folder, lambda m, _rank: 1.0, lambda m: 1, sections=sections, pause_s=0.001)
    if result is not None:
        path, last = result
        assert last == START - LR * len(path)
        assert path == [START - LR * (i + 1) for i in range(len(path))], "receipts change nothing for one learner"
    comm.barrier()
    (end,) = tape(folder, "Result")
    assert end["tokens"]["effective"] == end["tokens"]["processed"] - end["tokens"]["discarded"] >= 200
    assert end["num_merges"] > 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_run_at_full_speed_gives_the_model_that_its_tape_says(comm: Any, folder: Path, rule: str):
    """Under replace an outer gradient is LR * c_m * c_steps; the tape has the steps, so Theta can be computed from it.
    Who is in which merge is left to the race."""
    sections = {
        "run": {"max_steps": 150},
        "sync": {"quorum": 1, "interval": 4, "merge_rule": rule},
        "outer": {"optimizer": "nesterov", "lr": 0.25, "momentum": 0.5},
    }
    gradients = (1.0, -0.5, 0.25)
    result = run(folder, lambda m, _rank: gradients[m], lambda m: TOKENS[m], sections=sections, pause_s=0.002)
    comm.barrier()
    theta, buffer = START, 0.0
    published = {x["round"] for x in tape(folder, "Publish")}
    for merge in tape(folder, "Merge"):
        assert merge["round"] in published
        deltas = [LR * gradients[c["learner_id"]] * c["c_steps"] for c in merge["contributors"]]
        weights = [c["weight"] for c in merge["contributors"]]
        for c in merge["contributors"]:
            n = TOKENS[c["learner_id"]]
            assert c["c_tokens"] == n * c["c_steps"]
            assert c["weight"] == pytest.approx(c["c_tokens"] * n)
        total = sum(weights)
        mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / total
        if rule == "rda" and len(deltas) > 1:
            norm = sum(w * abs(d) for w, d in zip(weights, deltas, strict=True)) / total
            direction = sum(w * (1 if d > 0 else -1) for w, d in zip(weights, deltas, strict=True)) / total
            mean = mean if abs(direction) < 1e-6 else norm * (1 if direction > 0 else -1)
        buffer = 0.5 * buffer + mean
        theta -= 0.25 * (mean + 0.5 * buffer)
    checkpoint = final(folder)
    assert checkpoint.fragments[0].theta.tolist() == pytest.approx([theta], rel=1e-4)
    if result is not None:
        assert result[1] == checkpoint.fragments[0].theta.item()
    (end,) = tape(folder, "Result")
    ledger = end["tokens"]
    assert ledger["proposed"] == ledger["effective"] + ledger["discarded"]
    assert end["num_merges"] >= 10
    assert end["outcome"] == "drained"


# ---------------------------------------------------------------- refusals, the same for everybody


def refused(session_settings: dict[str, dict[str, Any]], model: torch.nn.Module) -> str:
    """The sentence with which a learner is refused, or the syncer's exit status."""
    try:
        session = pyddl.init(**session_settings)
    except SystemExit as ended:
        return f"exit {ended.code}"
    with pytest.raises((ConfigError, LayoutMismatch)) as caught:
        session.attach(model, torch.optim.SGD(model.parameters(), lr=LR))
    return str(caught.value)


@pytest.mark.mpi(min_size=3)
def test_run_whose_learners_are_configured_differently_is_refused_on_all_ranks(comm: Any):
    sentences = comm.allgather(refused({"sync": {"interval": 4 + (comm.rank == 2)}}, One()))
    assert sentences[0] == "exit 2"
    (sentence,) = set(sentences[1:])
    assert "sync.interval is '4' at the syncer and '5' at learner 1" in sentence


@pytest.mark.mpi(min_size=3)
def test_run_whose_learners_have_different_models_is_refused_with_the_difference(comm: Any):
    model = One()
    if comm.rank == 2:
        model.extra = torch.nn.Parameter(torch.zeros(2, 3))
    sentences = comm.allgather(refused({}, model))
    assert sentences[0] == "exit 2"
    (sentence,) = set(sentences[1:])
    assert "learner 1 differs from learner 0" in sentence
    assert "extra: extra (parameter, float32 [2, 3])" in sentence


@pytest.mark.mpi(min_size=3)
def test_run_whose_ranks_of_one_learner_have_different_models_is_refused_on_all_ranks(comm: Any):
    model = One()
    if comm.rank == 2:
        model.extra = torch.nn.Parameter(torch.zeros(1))
    sentences = comm.allgather(refused({"run": {"ranks": comm.size - 1}}, model))
    assert sentences[0] == "exit 2"
    assert all("all ranks of a learner must have the same model" in sentence for sentence in sentences[1:])


class Frozen(One):
    """One weight on top of frozen ones."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((4, 2), value, dtype=torch.bfloat16), requires_grad=False)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("as_one_learner", [False, True])
def test_run_whose_frozen_tensors_differ_is_refused_by_name_on_all_ranks(as_one_learner: bool, comm: Any):
    """They are never sent: each would train the same Theta in another model."""
    settings = {"run": {"ranks": comm.size - 1 if as_one_learner else 1}}
    sentences = comm.allgather(refused(settings, Frozen(1.5 + (comm.rank == 2))))
    assert sentences[0] == "exit 2"
    (sentence,) = set(sentences[1:])
    whose = "rank of learner 0" if as_one_learner else "learner"
    assert f"base of {whose} 1 differ from those of {whose} 0" in sentence


@pytest.mark.mpi(min_size=2)
def test_run_resumed_with_other_frozen_tensors_is_refused_by_name_and_with_the_same_ones_goes_on(
    comm: Any, folder: Path
):
    """No checkpoint holds them: Theta would go on in another model, and nothing would say so."""
    m = comm.size - 1
    thetas = trajectory([MERGED["mean"][m]] * 6, "sgd", 1.0, 0)

    def train(sections: dict[str, dict[str, Any]]) -> None:
        run(folder, lambda m, _rank: GRADIENTS[m], lambda m: TOKENS[m], sections=sections, make=lambda: Frozen(1.5))
        comm.barrier()

    train(lockstep(m))
    again = lockstep(m, run={"max_steps": 2 * STEPS, "resume": True, "dir": str(folder)})
    sentences = comm.allgather(refused(again, Frozen(2.5)))
    assert sentences[0] == "exit 2"
    (sentence,) = set(sentences[1:])
    assert f"; base differ from those of {folder}/checkpoint-{STEPS:010d}.h5: load the values" in sentence
    train(again)
    assert final(folder).fragments[0].theta.tolist() == pytest.approx([thetas[5]], rel=1e-6)


@pytest.mark.mpi(min_size=2)
def test_run_with_a_quorum_beyond_its_learners_is_refused_and_leaves_its_folder_free(comm: Any, folder: Path):
    settings = {"run": {"dir": str(folder / "run")}, "sync": {"quorum": comm.size}}
    sentences = comm.allgather(refused(settings, One()))
    assert sentences[0] == "exit 2"
    assert all("no merge could ever happen" in sentence for sentence in sentences[1:])
    comm.barrier()
    result = run(folder / "run", lambda m, _rank: 1.0, lambda m: 1, sections=lockstep(comm.size - 1))
    assert (result is None) == (comm.rank == 0), "the folder is not locked"


@pytest.mark.mpi(min_size=2)
def test_run_in_a_folder_that_holds_a_run_is_refused(comm: Any, folder: Path):
    run(folder, lambda m, _rank: 1.0, lambda m: 1, sections=lockstep(comm.size - 1))
    comm.barrier()
    before = sorted(p.name for p in folder.iterdir())
    comm.barrier()
    sentences = comm.allgather(refused({"run": {"dir": str(folder)}}, One()))
    assert sentences[0] == "exit 2"
    assert all("holds checkpoints" in sentence for sentence in sentences[1:])
    assert sorted(p.name for p in folder.iterdir()) == before


# ---------------------------------------------------------------- alone


@pytest.mark.mpi(min_size=1)
def test_init_alone_trains_with_one_warning(comm: Any, caplog: pytest.LogCaptureFixture):
    if comm.size > 1:
        pytest.skip("needs a world of one")
    with caplog.at_level(logging.WARNING):
        session = pyddl.init(run={"max_steps": 5}, sync={"interval": 4})
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        learner = session.attach(model, optimizer)
        items = []
        for item in learner.shard(range(3)):
            items.append(item)
            (model.w * 1.0).sum().backward()
            learner.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=2, loss=model.w.detach())
        learner.close()
    assert items == [0, 1, 2, 0, 1]
    assert (learner.tokens, model.w.item()) == (10, START - 5 * LR)
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "alone in its MPI world" in warning


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_init_alone_where_the_launcher_started_more_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
):
    """A wrong PMI: every task would train a model of its own, and nobody would notice."""
    if comm.size > 1:
        pytest.skip("needs a world of one")
    monkeypatch.delenv("PMI_HOSTNAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="has started 4 tasks, and MPI sees a world of 1"):
        pyddl.init()
