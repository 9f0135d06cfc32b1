"""Averages gradients over the ranks of one learner, overlapped with the backward pass.

Here: buckets, hooks and their non-blocking sums. Not here: MPI (link/world.py), the exchange with the syncer.

Gradients are summed in buckets of a few MB, in reverse order of the parameters. How often each parameter's gradient
is accumulated before ``average_gradients()`` is learnt in the first step; from then on a bucket's sum starts as soon
as its last gradient is there, while the backward pass goes on. Every call makes the same sums in the same order on
every rank, whatever a rank has accumulated: if a rank accumulates more often than before, all of them notice in the
last small sum and repeat the buckets, so that gradient accumulation needs no context manager and cannot go wrong
silently. The same if a gradient was changed or exchanged between its bucket's sum and ``average_gradients()``
(unscaling, division by the number of passes): the bucket is repeated with what the gradient is by then, and since
such a loop does so at every step, that rank's later sums wait for ``average_gradients()``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.kernels import checksum
from ..errors import TransportError
from ..link.courier import Pending

__all__ = ["GradientAverager"]


class _Group(Protocol):
    size: int

    def sum(self, array: NDArray[np.float32] | NDArray[np.int64]) -> Pending: ...
    def wait(self, request: Pending, what: str) -> None: ...


class _Bucket:
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.empty(sum(p.numel() for p in parameters), dtype=torch.float32)
        self.array: NDArray[np.float32] = self.flat.numpy()
        self.request: Pending | None = None

    def checksums(self) -> list[int | None]:
        """Of each gradient's bytes.

        Torch counts the changes of a tensor as well (``_version``), but not those that GradScaler.unscale_ makes, nor
        those by way of ``grad.data`` or numpy.
        """
        return [None if p.grad is None else _checksum(p.grad) for p in self.parameters]

    def fill(self) -> None:
        at = 0
        for p in self.parameters:
            part = self.flat[at : at + p.numel()]
            if p.grad is None:
                part.zero_()  # another rank may have used it
            else:
                part.copy_(p.grad.detach().reshape(-1))
            at += p.numel()

    def spread(self, scale: float, is_used: list[bool]) -> None:
        self.flat.mul_(scale)
        at = 0
        for p, used in zip(self.parameters, is_used, strict=True):
            part = self.flat[at : at + p.numel()].view(p.shape)
            if p.grad is None and used:
                p.grad = part.to(p.dtype, copy=True)
            elif p.grad is not None:
                p.grad.detach().copy_(part)
            at += p.numel()


def _checksum(tensor: torch.Tensor) -> int:
    return checksum(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


class GradientAverager:
    """See the module's docstring.

    Args:
        parameters: those that are trained, in the same order on every rank.
        group: the learner's ranks.
        bucket_bytes: size of a bucket.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], group: _Group, bucket_bytes: int = 4 << 20) -> None:
        self._group = group
        self._buckets: list[_Bucket] = []
        pending: list[torch.nn.Parameter] = []
        size = 0
        for p in reversed(parameters):
            pending.append(p)
            size += 4 * p.numel()
            if size >= bucket_bytes:
                self._buckets.append(_Bucket(pending))
                pending, size = [], 0
        if pending:
            self._buckets.append(_Bucket(pending))
        self._bucket_of = {id(p): i for i, b in enumerate(self._buckets) for p in b.parameters}
        self._expected: list[int] | None = None  # accumulations per bucket and step, learnt
        self._seen = [0] * len(self._buckets)
        self._launched = 0
        self._overlaps = True  # until a gradient is changed after its sum has started
        self._early: list[list[int | None]] = []  # checksums of the buckets whose sums started in the backward pass
        self._failure: TransportError | None = None  # of a sum in a hook, where nobody would catch it
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def average(self) -> None:
        """Replace every gradient by its mean over the ranks; the same on all of them.

        A parameter that no rank has used keeps no gradient, so that the optimizer leaves it alone, as with one rank.

        Raises:
            TransportError: if a rank does not take part within the group's timeout.
        """
        if self._failure is not None:
            raise self._failure
        late = self._expected is not None and self._seen != self._expected
        early = zip(self._buckets[: self._launched], self._early, strict=True)
        if not late and any(bucket.checksums() != checksums for bucket, checksums in early):
            late, self._overlaps = True, False
        while self._launched < len(self._buckets):
            self._launch()
        # every rank learns whether any rank's buckets were summed before its last gradient was in, and how many ranks
        # have used each parameter
        used = [p.grad is not None for bucket in self._buckets for p in bucket.parameters]
        verdict = np.array([late, *used], dtype=np.int64)
        request = self._group.sum(verdict)
        for i, bucket in enumerate(self._buckets):
            assert bucket.request is not None
            self._group.wait(bucket.request, f"gradient bucket {i}")
        self._group.wait(request, "the verdict on the gradients")
        if verdict[0]:
            for bucket in self._buckets:
                bucket.fill()
                bucket.request = self._group.sum(bucket.array)
            for i, bucket in enumerate(self._buckets):
                self._group.wait(bucket.request, f"gradient bucket {i}, repeated")  # type: ignore[arg-type]
        is_used = iter((verdict[1:] > 0).tolist())
        for bucket in self._buckets:
            bucket.spread(1 / self._group.size, [next(is_used) for _ in bucket.parameters])
            bucket.request = None
        self._expected = self._seen
        self._seen = [0] * len(self._buckets)
        self._launched = 0
        self._early = []

    def _accumulated(self, p: torch.nn.Parameter) -> None:
        self._seen[self._bucket_of[id(p)]] += 1
        if self._expected is None or not self._overlaps or self._failure is not None:
            return
        while self._launched < len(self._buckets):
            wanted = self._expected[self._launched]
            if wanted == 0 or self._seen[self._launched] < wanted:
                return
            self._early.append(self._buckets[self._launched].checksums())
            try:
                self._launch()
            except TransportError as error:  # average() raises it
                self._failure = error
                return

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        bucket.fill()
        bucket.request = self._group.sum(bucket.array)
        self._launched += 1
