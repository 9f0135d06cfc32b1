"""Which items a rank trains on: disjoint over the ranks, together all, neither twice nor never on resume."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
from collections import Counter as Tally
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from pyddl.config import load_config
from pyddl.errors import ConfigError
from pyddl.run.learner import _MANY_SOURCES, Learner
from pyddl.run.shards import Shard
from pyddl.store.trace import Trace


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Counter:
    """A source with a state of its own, already this learner's share."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shard(source: Any, index: int = 0, count: int = 1, *, seed: int = 0, endless: bool = False, **more: Any) -> Shard:
    return Shard(source, index=index, count=count, seed=seed, endless=endless, **more)


def take(source: Any, number: int) -> list[Any]:
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in itertools.islice(iter(source), number)]


def flat(batches: list[Any]) -> list[int]:
    return [x for batch in batches for x in (batch if isinstance(batch, list) else [batch])]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("make", [lambda n: range(n), lambda n: (i for i in range(n))], ids=["range", "generator"])
def test_shard_iterable_each_rank_takes_every_nth_item_of_whole_groups(make: Any, count: int):
    """One rank that came to its end alone would leave the others waiting in their next sum."""
    shares = [take(shard(make(23), index, count), 100) for index in range(count)]
    used = 23 - 23 % count
    assert shares == [list(range(index, used, count)) for index in range(count)]


def test_shard_iterable_resumed_goes_on_with_the_next_item():
    whole = take(shard(range(11), 1, 2, endless=True), 12)
    assert whole == [1, 3, 5, 7, 9, 1, 3, 5, 7, 9, 1, 3]
    first = shard(range(11), 1, 2, endless=True)
    begun = take(first, 7)
    second = shard(range(11), 1, 2, endless=True)
    second.load_state_dict(first.state_dict())
    assert begun + take(second, 5) == whole


def test_shard_iterable_that_is_endless_begins_again():
    assert take(shard(range(5), 1, 2, endless=True), 6) == [1, 3, 1, 3, 1, 3]


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize(
    ("source", "count", "gave"), [(range(2), 3, "the range gave 2"), ([], 1, "the list gave 0")], ids=["few", "none"]
)
def test_shard_iterable_with_too_little_for_all_is_refused_on_every_rank(
    source: Any, count: int, gave: str, endless: bool
):
    for index in range(count):
        with pytest.raises(ConfigError, match=f"each of the {count} ranks of all learners; {gave}"):
            take(shard(source, index, count, endless=endless), 5)


def test_shard_loader_with_fewer_samples_than_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"each of the 4 ranks of all learners; .* holds 3"):
        shard(DataLoader(Numbers(3)), 0, 4)
    with pytest.raises(ConfigError, match="holds 0"):
        shard(DataLoader(Numbers(0)), 0, 1)


def test_shard_loader_whose_share_fills_no_batch_is_refused():
    loader = DataLoader(Numbers(15), batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match="15 samples are 3 for each, and batch_size=4 with drop_last=True"):
        shard(loader, 0, 5)
    assert [len(b) for b in take(shard(loader, 0, 4), 9)] == [4], "15 made up to 16"


def test_shard_iterator_that_can_be_read_once_ends_and_says_so_if_it_should_not(caplog: pytest.LogCaptureFixture):
    assert take(shard(iter(range(4))), 100) == [0, 1, 2, 3]
    assert not caplog.records
    assert take(shard(iter(range(4)), endless=True), 100) == [0, 1, 2, 3]
    assert "must be able to begin again" in caplog.text
    assert "range_iterator" in caplog.text


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "count"), [(17, 2), (23, 3), (23, 4), (24, 4), (5, 4), (7, 1)])
def test_shard_loader_gives_all_ranks_equally_many_batches_and_every_sample(
    size: int, count: int, drop_last: bool, shuffle: bool
):
    """17 samples over two ranks in batches of 4 were 3 and 2 batches: the ranks' sums met one another wrongly."""
    batch = min(4, -(-size // count))
    loader = DataLoader(Numbers(size), batch_size=batch, shuffle=shuffle, drop_last=drop_last)
    shares = [take(shard(loader, index, count), 100) for index in range(count)]
    assert len({tuple(map(len, share)) for share in shares}) == 1, "the same number, of the same sizes"
    if drop_last:
        return
    tally = Tally(itertools.chain(*map(flat, shares)))
    assert sorted(tally) == list(range(size))
    assert tally.total() - size == -size % count, "no more is taken twice than is needed"
    assert max(tally.values()) <= 2
    if not shuffle:
        assert flat(shares[-1])[0] == count - 1
        assert [n for n, times in tally.items() if times == 2] == list(range(-size % count))


def test_shard_shuffled_loader_has_another_order_in_each_epoch_and_for_each_seed():
    loader = DataLoader(Numbers(20), batch_size=5, shuffle=True)
    two_epochs = flat(take(shard(loader, endless=True), 8))
    first, second = two_epochs[:20], two_epochs[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))
    assert first == flat(take(shard(loader), 4)), "the permutation is a function of seed and epoch"
    assert first != flat(take(shard(loader, seed=1), 4))


def test_shard_loader_keeps_batch_size_collate_and_drop_last():
    loader = DataLoader(Numbers(11), batch_size=3, drop_last=True, collate_fn=lambda items: {"x": items})
    batches = take(shard(loader), 100)
    assert batches == [{"x": [0, 1, 2]}, {"x": [3, 4, 5]}, {"x": [6, 7, 8]}]


def test_shard_loader_without_batches_yields_single_items():
    loader = DataLoader(Numbers(6), batch_size=None)
    assert take(shard(loader, 1, 2), 100) == [1, 3, 5]


def test_shard_loader_with_a_batch_sampler_of_its_own_keeps_the_batches():
    sampler = BatchSampler(SequentialSampler(range(12)), 3, drop_last=False)
    loader = DataLoader(Numbers(12), batch_sampler=sampler)
    assert take(shard(loader, 0, 2), 100) == [[0, 1, 2], [6, 7, 8]]
    assert take(shard(loader, 1, 2), 100) == [[3, 4, 5], [9, 10, 11]]


def test_shard_loader_with_a_sampler_of_its_own_keeps_what_it_draws():
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 0.0], num_samples=8)
    loader = DataLoader(Numbers(4), batch_size=2, sampler=sampler)
    assert take(shard(loader, 0, 2), 100) == [[1, 1], [1, 1]]


class MyDistributedSampler(DistributedSampler):
    pass


def share_of_four(kind: type[DistributedSampler] = DistributedSampler) -> DistributedSampler:
    return kind(Numbers(16), num_replicas=4, rank=1, shuffle=False)


DIVIDED = {
    "sampler": lambda: DataLoader(Numbers(16), batch_size=2, sampler=share_of_four()),
    "single_items": lambda: DataLoader(Numbers(16), batch_size=None, sampler=share_of_four()),
    "subclass": lambda: DataLoader(Numbers(16), batch_size=2, sampler=share_of_four(MyDistributedSampler)),
    "batch_sampler": lambda: DataLoader(Numbers(16), batch_sampler=BatchSampler(share_of_four(), 2, False)),
    "own_way": lambda: Doubling(Numbers(16), batch_size=2, sampler=share_of_four()),
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", DIVIDED)
def test_shard_loader_that_divides_the_data_itself_is_refused(kind: str, count: int):
    """Each of four ranks would take every fourth batch of its own quarter: 12 of 16 samples were never read."""
    with pytest.raises(ConfigError, match=r"divides the data .* itself; got .*DistributedSampler .* without that"):
        shard(DIVIDED[kind](), 0, count)


def test_shard_loader_with_its_own_state_may_divide_the_data_itself():
    assert take(shard(Own(Numbers(16), batch_size=2, sampler=share_of_four()), 1, 4), 9) == [[1, 5], [9, 13]]


def test_shard_loader_over_an_iterable_dataset_is_taken_as_an_iterable():
    loader = DataLoader(Stream(), batch_size=2)
    assert take(shard(loader, 0, 2), 100) == [[0, 1], [4, 5]]
    assert take(shard(loader, 1, 2), 100) == [[2, 3], [6, 7]]


def test_shard_source_with_its_own_state_is_passed_through_whole():
    source = Counter()
    share = shard(source, 1, 4)
    assert take(share, 3) == [1, 2, 3]
    assert share.state_dict() == {"own": {"at": 3}}
    other = shard(Counter(), 1, 4)
    other.load_state_dict(share.state_dict())
    assert take(other, 2) == [4, 5]


SOURCES = {
    "iterable": lambda: range(17),
    "loader": lambda: DataLoader(Numbers(17), batch_size=3),
    "shuffled": lambda: DataLoader(Numbers(17), batch_size=3, shuffle=True),
    "own": Counter,
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 7, 11])
def test_shard_resumed_anywhere_goes_on_with_the_very_next_item(kind: str, stop: int):
    """Several epochs; stops before, at and after the end of an epoch. The cursor survives JSON."""
    whole = take(shard(SOURCES[kind](), 1, 2, endless=True), 24)
    first = shard(SOURCES[kind](), 1, 2, endless=True)
    begun = take(first, stop)
    cursor = json.loads(json.dumps(first.state_dict()))
    second = shard(SOURCES[kind](), 1, 2, endless=True)
    second.load_state_dict(cursor)
    assert begun + take(second, 24 - stop) == whole


def test_shard_resumed_twice_neither_repeats_nor_skips():
    whole = take(shard(range(10), endless=True), 25)
    seen: list[int] = []
    cursor: dict[str, Any] | None = None
    for number in (3, 9, 1, 12):
        part = shard(range(10), endless=True)
        if cursor is not None:
            part.load_state_dict(cursor)
        seen += take(part, number)
        cursor = part.state_dict()
    assert seen == whole


def test_shard_resumed_at_the_end_of_a_single_pass_is_over():
    first = shard(range(4))
    take(first, 4)
    second = shard(range(4))
    second.load_state_dict(first.state_dict())
    assert take(second, 10) == []


def test_shard_own_source_resumed_at_the_end_of_its_pass_begins_the_next_one():
    class Ending(Counter):
        def __iter__(self):
            while self.at < 3:
                self.at += 1
                yield self.at
            self.at = 0

    assert take(shard(Ending(at=3), endless=True), 4) == [1, 2, 3, 1]
    assert take(shard(Ending(at=3)), 4) == []


def test_shard_own_source_that_never_gives_anything_ends():
    class Nothing(Counter):
        def __iter__(self):
            return iter(())

    assert take(shard(Nothing(), endless=True), 4) == []


@pytest.mark.parametrize("own", [False, True])
def test_shard_cursor_of_another_kind_of_source_is_left_with_a_warning(own: bool, caplog: pytest.LogCaptureFixture):
    sources = [range(5), Counter()]
    share = shard(sources[own])
    share.load_state_dict(shard(sources[not own]).state_dict())
    assert "a data cursor must be that of the source it is for" in caplog.text
    assert take(share, 2) == ([1, 2] if own else [0, 1])


# ---------------------------------------------------------------- what a loader's workers are


class Own(DataLoader):
    """Like torchdata's loader: it keeps its own place."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Doubling(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


WITH_WORKERS = {
    "plain": lambda **more: DataLoader(Numbers(8), batch_size=2, num_workers=1, **more),
    "own_batches": lambda **more: DataLoader(
        Numbers(12), batch_sampler=BatchSampler(SequentialSampler(range(12)), 3, False), num_workers=1, **more
    ),
    "own_sampler": lambda **more: DataLoader(
        Numbers(4), batch_size=2, sampler=RandomSampler(range(4), num_samples=2), num_workers=1, **more
    ),
    "stream": lambda **more: DataLoader(Stream(), batch_size=2, num_workers=1, **more),
}


@pytest.fixture
def _no_global_start_method(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: None if allow_none else "fork")


@pytest.mark.usefixtures("_no_global_start_method")
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_shard_loader_of_any_kind_starts_its_workers_by_forkserver(kind: str):
    """A fork after MPI_Init is unsafe."""
    loader = WITH_WORKERS[kind]()
    items = shard(loader, 1, 2)._items
    assert items.multiprocessing_context.get_start_method() == "forkserver"
    assert loader.multiprocessing_context is None, "the user's own is left as it is"
    if kind != "plain":
        for name in ("batch_size", "drop_last", "dataset"):
            assert getattr(items, name) == getattr(loader, name)
    if kind == "own_batches":
        assert items.batch_sampler is loader.batch_sampler
    if kind == "own_sampler":
        assert items.sampler is loader.sampler


@pytest.mark.usefixtures("_no_global_start_method")
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_shard_loader_that_asks_for_forked_workers_is_refused(kind: str):
    with pytest.raises(ConfigError, match="got multiprocessing_context='fork'"):
        shard(WITH_WORKERS[kind](multiprocessing_context="fork"), 1, 2)


@pytest.mark.usefixtures("_no_global_start_method")
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_shard_loader_that_says_spawn_is_obeyed(kind: str):
    items = shard(WITH_WORKERS[kind](multiprocessing_context="spawn"), 1, 2)._items
    assert items.multiprocessing_context.get_start_method() == "spawn"


def test_shard_loader_under_a_global_spawn_is_left_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    assert shard(WITH_WORKERS["plain"](), 1, 2)._items.multiprocessing_context is None


@pytest.mark.usefixtures("_no_global_start_method")
@pytest.mark.parametrize("kind", [Own, Doubling])
def test_shard_loader_that_cannot_be_rebuilt_is_refused_if_it_would_fork(kind: type[DataLoader]):
    with pytest.raises(ConfigError, match=f"iterates a {kind.__name__} as it is, and its num_workers=1"):
        shard(kind(Numbers(8), num_workers=1), 1, 2)
    loader = kind(Numbers(8), num_workers=1, multiprocessing_context="forkserver")
    assert shard(loader, 1, 2)._items is loader
    assert shard(kind(Numbers(8)), 1, 2).source is not None


def test_shard_loader_that_iterates_in_its_own_way_keeps_it():
    assert take(shard(Doubling(Numbers(8), batch_size=2), 1, 2), 9) == [[4, 6], [12, 14]]


@pytest.mark.parametrize("workers", [0, 2])
def test_shard_loader_keeps_every_setting_that_is_not_about_what_is_drawn(workers: int):
    settings: dict[str, Any] = {"generator": torch.Generator(), "pin_memory": True, "collate_fn": sorted}
    if workers:
        settings |= {
            "num_workers": workers,
            "prefetch_factor": 5,
            "timeout": 7,
            "persistent_workers": True,
            "worker_init_fn": print,
            "multiprocessing_context": multiprocessing.get_context("spawn"),
            "in_order": False,
        }
    items = shard(DataLoader(Numbers(8), batch_size=2, **settings), 1, 2)._items
    assert {name: getattr(items, name) for name in settings} == settings


class Remembering(Numbers):
    """Tells what the process that reads it has in its memory."""

    memory = 0

    def __getitem__(self, index: int) -> int:
        return 100 * Remembering.memory + index


@pytest.mark.usefixtures("_no_global_start_method")
def test_shard_workers_that_are_really_started_read_the_share_and_are_not_copies_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Remembering, "memory", 1)  # a forked worker would have it, too
    assert take(shard(DataLoader(Remembering(8), batch_size=2, num_workers=1), 1, 2), 9) == [[1, 3], [5, 7]]


# ---------------------------------------------------------------- Learner.shard


def alone(*settings: str, num_learners: int = 1) -> Learner:
    """A learner without a syncer: it never copies its model."""
    config, _ = load_config(None, settings)
    model = torch.nn.Linear(1, 1)
    return Learner(
        config, model, torch.optim.SGD(model.parameters(), lr=0.1), None, None,
        learner_id=0, num_learners=num_learners, num_ranks=1, receipts=Trace(None), save=lambda who: None,
    )  # fmt: skip


def test_learner_shard_of_the_same_source_goes_on_with_the_next_epoch():
    learner = alone()
    loader = DataLoader(Numbers(20), batch_size=5, shuffle=True)
    epochs = [flat(take(learner.shard(loader), 99)) for _ in range(3)]
    wanted = flat(take(shard(loader, endless=True), 12))
    assert epochs == [wanted[:20], wanted[20:40], wanted[40:]], "each with its own permutation"
    assert [s.state_dict() for s in learner.shards] == [{"epoch": 2, "position": 4}], "one cursor, however many calls"


def test_learner_shard_after_a_pass_that_was_left_begins_the_next_epoch():
    learner = alone()
    source = list(range(6))
    for item in learner.shard(source):
        if item == 2:
            break
    assert take(learner.shard(source), 99) == source
    assert learner.shards[0].state_dict() == {"epoch": 1, "position": 6}


def test_learner_shard_resumed_finishes_the_epoch_and_then_goes_on_with_the_next():
    loader = DataLoader(Numbers(12), batch_size=2, shuffle=True)
    undisturbed = alone()
    whole = [flat(take(undisturbed.shard(loader), 99)) for _ in range(3)]
    first = alone()
    take(first.shard(loader), 99)
    begun = flat(take(first.shard(loader), 2))
    second = alone()
    second.resume_cursors([s.state_dict() for s in first.shards])
    assert begun + flat(take(second.shard(loader), 99)) == whole[1]
    assert flat(take(second.shard(loader), 99)) == whole[2]


def test_learner_shard_of_two_sources_keeps_a_cursor_for_each_in_the_order_of_the_calls():
    learner = alone()
    ours, others = range(4), range(10, 13)
    for _ in range(2):
        take(learner.shard(ours), 99)
        take(learner.shard(others), 1)
    assert [s.state_dict() for s in learner.shards] == [{"epoch": 1, "position": 4}, {"epoch": 1, "position": 1}]
    again = alone()
    again.resume_cursors([s.state_dict() for s in learner.shards])
    mine, theirs = again.shard(ours), again.shard(others)
    assert take(theirs, 1) == [11], "whichever is read first"
    assert take(mine, 1) == []


def test_learner_shard_of_ever_new_sources_warns_once(caplog: pytest.LogCaptureFixture):
    learner = alone()
    for _ in range(3 * _MANY_SOURCES):
        take(learner.shard([1, 2]), 9)
    assert [r.message for r in caplog.records if "the same object" in r.message] == [caplog.messages[0]]


def test_learner_shard_refuses_at_the_call():
    with pytest.raises(ConfigError, match="holds 1"):
        alone(num_learners=2).shard(DataLoader(Numbers(1)))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Counter(), "learner.shard(Counter): taken as this rank's own, undivided, since it has a state_dict"),
        (range(9), "learner.shard(range): rank 0 of the 2 of all learners takes one of every 2 items, item 0 first"),
        (
            DataLoader(Numbers(9), shuffle=True),
            "learner.shard(DataLoader): rank 0 of the 2 of all learners makes batches of 5 of the 9 samples in each "
            "epoch, shuffled by pyddl",
        ),
    ],
    ids=["own", "strided", "loader"],
)
def test_learner_shard_says_once_how_a_source_is_divided(source: Any, says: str, caplog: pytest.LogCaptureFixture):
    learner = alone(num_learners=2)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            take(learner.shard(source), 2)
    assert caplog.messages == [says]
