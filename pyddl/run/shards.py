"""Which items of the user's data a rank trains on, and where it stands in them.

Here: sharding of iterables and DataLoaders, with a cursor that can be saved. Not here: reading data (tasks/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

__all__ = ["Shard"]


class _OwnPermutation(Sampler[int]):
    """Every ``count``-th index of a permutation keyed by (seed, epoch), from a position on."""

    def __init__(self, size: int, index: int, count: int, seed: int, shuffle: bool) -> None:
        self.size, self.index, self.count, self.seed, self.shuffle = size, index, count, seed, shuffle
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        key = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        order = torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)
        return iter(order[self.index :: self.count].tolist())

    def __len__(self) -> int:
        return len(range(self.index, self.size, self.count))


def _draws_plainly(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads its data set in order or shuffled; what draws otherwise is left to draw as it does."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return False
    has_own_batches = loader.batch_size is None and loader.batch_sampler is not None
    return type(sampler) in (RandomSampler, SequentialSampler) and not has_own_batches


class Shard:
    """One rank's share of a source; see ``Learner.shard``.

    Args:
        source: an iterable; see there for what is done with which.
        index: of this rank among all ranks of all learners, 0..count-1.
        count: of all ranks.
        seed: of the permutations.
        endless: begin again when the source ends.
    """

    def __init__(self, source: Iterable[Any], *, index: int, count: int, seed: int, endless: bool) -> None:
        self.epoch = 0
        self.position = 0  # items yielded in this epoch
        self._skip = 0
        self._index, self._count, self._endless = index, count, endless
        self._own = source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None
        self._sampler: _OwnPermutation | None = None
        self._source = source
        if self._own is None and isinstance(source, DataLoader) and _draws_plainly(source):
            self._source = self._resharded(source, seed)

    def _resharded(self, loader: DataLoader[Any], seed: int) -> Iterable[Any]:
        shuffle = isinstance(loader.sampler, RandomSampler)
        size = len(loader.dataset)  # type: ignore[arg-type]
        self._sampler = _OwnPermutation(size, self._index, self._count, seed, shuffle)
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context="forkserver" if loader.num_workers else None,  # a fork after MPI_Init is unsafe
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self._sampler is not None:
                self._sampler.epoch = self.epoch
            empty = True
            for number, item in enumerate(self._source):
                if self._own is None and self._sampler is None and number % self._count != self._index:
                    continue
                empty = False
                if self._skip:
                    self._skip -= 1
                    continue
                self.position += 1
                yield item
            if empty or not self._endless:
                return
            self.epoch, self.position, self._skip = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""
        if self._own is not None:
            return {"own": self._own.state_dict()}
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor."""
        if self._own is not None:
            self._own.load_state_dict(state["own"])
            return
        self.epoch = state["epoch"]
        self.position = self._skip = state["position"]
