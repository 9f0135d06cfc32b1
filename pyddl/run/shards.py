"""Which items of the user's data a rank trains on, and where it stands in them.

Here: sharding of iterables and DataLoaders, how a DataLoader's workers are started, a cursor that can be saved. Not
here: reading data (tasks/).

Every rank of every learner is given equally many items in each pass: ranks of a learner average their gradients and
must make the same number of steps. A DataLoader's samples are made up to a whole number for all with samples from the
start of the pass; of other iterables, what does not suffice for all is left out.

So nothing else may divide the data: a DataLoader that draws by torch's DistributedSampler, directly or below its
batch_sampler, is refused. It would be divided twice, and most of the data never be read. Only a source that has a
state_dict is taken as it is, and there such a sampler is in its place.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..errors import ConfigError

__all__ = ["Shard"]

log = logging.getLogger(__name__)


class _OwnPermutation(Sampler[int]):
    """Every ``count``-th index of a permutation keyed by (seed, epoch), made up to equally many for all."""

    def __init__(self, size: int, index: int, count: int, seed: int, shuffle: bool) -> None:
        self.size, self.index, self.count, self.seed, self.shuffle = size, index, count, seed, shuffle
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        key = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        order = torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)
        whole = torch.cat([order, order[: len(self) * self.count - self.size]])
        return iter(whole[self.index :: self.count].tolist())

    def __len__(self) -> int:
        return -(-self.size // self.count)


class Shard:
    """One rank's share of one source; see ``Learner.shard`` for what is done with which kind.

    Iterating makes passes: the first goes on from the cursor, each further one is the next epoch.

    Args:
        source: an iterable.
        index: of this rank among all ranks of all learners, 0..count-1.
        count: of all ranks.
        seed: of the permutations.
        endless: one iteration makes pass after pass, until a pass gives nothing.

    Attributes:
        source: as it was given.
        epoch: of the present pass; ``position``: items given in it.

    Raises:
        ConfigError: if not every rank can have an item, if the data are divided already, or if workers would be forked.
    """

    def __init__(self, source: Iterable[Any], *, index: int, count: int, seed: int, endless: bool) -> None:
        self.source = source
        self.epoch = 0
        self.position = 0
        self._index, self._count, self._endless = index, count, endless
        self._is_begun = False
        self._has_given = False
        self._own = source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None
        self._sampler: _OwnPermutation | None = None
        self._items = source
        if isinstance(source, DataLoader):
            self._items = self._from_loader(source, seed)
        log.info("learner.shard(%s): %s", type(source).__name__, self._describe())

    def _from_loader(self, loader: DataLoader[Any], seed: int) -> Iterable[Any]:
        """What is iterated in a loader's place: one of this rank's samples, one of the same batches, or itself."""
        if self._own is None:
            _require_undivided(loader)
        has_safe_workers = _worker_context(loader) is loader.multiprocessing_context
        if self._own is not None or type(loader).__iter__ is not DataLoader.__iter__:
            if not has_safe_workers:
                raise ConfigError(
                    "a DataLoader's workers must not be forked once MPI has started; learner.shard() iterates a "
                    f"{type(loader).__name__} as it is, and its num_workers={loader.num_workers} would be forked; "
                    "give it multiprocessing_context='forkserver'"
                )
            return loader
        batches: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if _draws_plainly(loader):
            self._sampler = self._sample(loader, seed)
            return _rebuilt(loader, sampler=self._sampler, **batches)
        if has_safe_workers:
            return loader
        if isinstance(loader.dataset, IterableDataset):
            return _rebuilt(loader, **batches)
        if _has_own_batches(loader):
            return _rebuilt(loader, batch_sampler=loader.batch_sampler)
        return _rebuilt(loader, sampler=loader.sampler, **batches)

    def _sample(self, loader: DataLoader[Any], seed: int) -> _OwnPermutation:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if size < self._count:
            raise ConfigError(
                f"learner.shard() must have at least one sample for each of the {self._count} ranks of all learners; "
                f"the DataLoader's data set holds {size}; give more data or start fewer ranks"
            )
        sampler = _OwnPermutation(size, self._index, self._count, seed, isinstance(loader.sampler, RandomSampler))
        if loader.drop_last and len(sampler) < (loader.batch_size or 1):
            raise ConfigError(
                f"learner.shard() must be able to fill a batch on each of the {self._count} ranks of all learners; "
                f"{size} samples are {len(sampler)} for each, and batch_size={loader.batch_size} with drop_last=True "
                "leaves no batch; lower batch_size or leave drop_last out"
            )
        return sampler

    def _describe(self) -> str:
        if self._own is not None:
            return "taken as this rank's own, undivided, since it has a state_dict"
        this_rank = f"rank {self._index} of the {self._count} of all learners"
        if self._sampler is not None:
            order = "shuffled by pyddl" if self._sampler.shuffle else "in order"
            return (
                f"{this_rank} makes batches of {len(self._sampler)} of the {self._sampler.size} samples in each epoch, "
                f"{order}"
            )
        return f"{this_rank} takes one of every {self._count} items, item {self._index} first"

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            self._begin_next_epoch()
        self._is_begun = True
        num_empty = 0
        while True:
            if self._sampler is not None:
                self._sampler.epoch = self.epoch
            number, start = 0, self.position
            for number, item in enumerate(self._share(), start=1):
                if number > start:
                    self.position = number
                    yield item
            num_empty = 0 if number else num_empty + 1
            if not self._endless:
                return
            # an own source that was resumed at its very end gives nothing once
            if num_empty > (0 if self._own is None else 1):
                log.warning(
                    "learner.shard() must be able to begin again, since the run has an end of its own; the %s gave "
                    "nothing in epoch %d and this rank's data end here; pass what can be iterated more than once",
                    type(self.source).__name__,
                    self.epoch,
                )
                return
            self._begin_next_epoch()

    def _begin_next_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def _share(self) -> Iterator[Any]:
        """One pass over what is this rank's."""
        if self._own is not None or self._sampler is not None:
            yield from self._items
            return
        num_seen, mine = 0, None
        for num_seen, item in enumerate(self._items, start=1):
            place = (num_seen - 1) % self._count
            if place == self._index:
                mine = item
            if place == self._count - 1:  # only now it is sure that every rank has one
                self._has_given = True
                yield mine
        if not self._has_given:
            raise ConfigError(
                f"learner.shard() must have at least one item for each of the {self._count} ranks of all learners; "
                f"the {type(self.source).__name__} gave {num_seen}; give more (or smaller) items or start fewer ranks"
            )

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""
        if self._own is not None:
            return {"own": self._own.state_dict()}
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor; from the start, with a warning, if it is that of another kind of source."""
        if (self._own is not None) != ("own" in state):
            log.warning(
                "a data cursor must be that of the source it is for; the %s %s a state_dict of its own and the source "
                "of the run before was otherwise; this rank's data begin at their start",
                type(self.source).__name__,
                "has no" if self._own is None else "has",
            )
        elif self._own is not None:
            self._own.load_state_dict(state["own"])
        else:
            self.epoch, self.position = state["epoch"], state["position"]


def _require_undivided(loader: DataLoader[Any]) -> None:
    """Refuse a loader that draws by a DistributedSampler: each rank would get a share of a share.

    Also where one rank is all there is, so that a script that is tried alone meets the same sentence.
    """
    samplers: list[Any] = [loader.sampler, loader.batch_sampler]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]  # what a batch sampler wraps
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "learner.shard() divides the data among all ranks of all learners itself; got a DataLoader whose "
                f"{type(sampler).__name__} divides them, too, so that most would never be read; give the DataLoader "
                "without that sampler (shuffle=True shuffles anew in each epoch)"
            )


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is None and loader.batch_sampler is not None


def _draws_plainly(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads its data set in order or shuffled; what draws otherwise is left to draw as it does."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and not _has_own_batches(loader)


def _worker_context(loader: DataLoader[Any]) -> Any:
    """How a loader's workers are to be started: as the user says, else by forkserver.

    A fork after MPI_Init is unsafe: the child inherits MPI's memory, locks and connections.

    Raises:
        ConfigError: if the user asks for a fork.
    """
    if not loader.num_workers:
        return None
    context = loader.multiprocessing_context
    if context is None:
        is_safe = multiprocessing.get_start_method(allow_none=True) in ("forkserver", "spawn")
        return None if is_safe else "forkserver"
    if context.get_start_method() == "fork":
        raise ConfigError(
            "a DataLoader's workers must not be forked once MPI has started; got multiprocessing_context='fork'; "
            "leave it out, or say 'forkserver' or 'spawn'"
        )
    return context


def _rebuilt(loader: DataLoader[Any], **draws: Any) -> DataLoader[Any]:
    """A loader like the given one, but for what it draws and how its workers are started."""
    newer: dict[str, Any] = {}  # torch 2.4 lacks the one, later versions warn of the other even if it is empty
    if hasattr(loader, "in_order"):
        newer["in_order"] = loader.in_order
    if getattr(loader, "pin_memory_device", ""):
        newer["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=_worker_context(loader),
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **newer,
        **draws,
    )
