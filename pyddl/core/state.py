"""The global model Theta with its outer momentum, and one outer step on a fragment (paper, syncer).

Here: the arrays and the arithmetic around the merge kernel. Not here: when to merge and with whom (protocol.py), files
(store/), mailboxes (link/).

A merge is out of place: it writes fresh buffers, and only :meth:`GlobalState.commit` makes them the present version.
Who holds an older :class:`FragmentVersion` (a checkpoint being written, a copy to a learner) keeps reading what it
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LayoutMismatch
from .kernels import MergeReport, OuterStep, encode_bf16, merge_outer_step
from .layout import Layout

__all__ = ["FragmentVersion", "GlobalState", "Input", "StepResult"]


@dataclass(frozen=True, eq=False)
class FragmentVersion:
    """One version of one fragment; never changed once built.

    Attributes:
        theta: [n] float32. momentum: [n] float32, or None with plain SGD. counters: [c] int64.
        wire: [n] as it goes to the learners: theta itself, or its bf16 bits as uint16.
    """

    version: int
    theta: NDArray[np.float32]
    momentum: NDArray[np.float32] | None
    counters: NDArray[np.int64]
    wire: NDArray[Any]


@dataclass(frozen=True)
class Input:
    """One contribution: outer gradient [n] float32 or uint16 (bf16 bits), counters [c] int64, its weight and step."""

    learner_id: int
    weight: float
    step: int
    floats: NDArray[Any]
    counters: NDArray[np.int64]


@dataclass(frozen=True)
class StepResult:
    """What a merge gave: the new version (None if nothing could be merged), who had to be left out and why."""

    fragment: int
    new: FragmentVersion | None
    rejected: tuple[tuple[int, str], ...]
    report: MergeReport | None


class GlobalState:
    """Theta and momentum of all fragments.

    Args:
        layout: parameters -> fragments.
        outer: the outer optimizer.
        merge_rule: "rda" or "mean" for parameters; embeddings are always merged by mean.
        wire: "f32" or "bf16".
        backend: of the merge kernel (core/kernels.py).
    """

    def __init__(self, layout: Layout, *, outer: OuterStep, merge_rule: str, wire: str, backend: str) -> None:
        self.layout = layout
        self._outer = outer
        self._wire = wire
        self._backend = backend
        self._rules = [fragment.rules(layout, merge_rule) for fragment in layout.fragments]
        self._offsets = [fragment.offsets() for fragment in layout.fragments]
        self._present: list[FragmentVersion | None] = [None] * len(layout.fragments)

    def __getitem__(self, fragment: int) -> FragmentVersion:
        """The present version of a fragment."""
        present = self._present[fragment]
        assert present is not None, "the global state is used before load()"
        return present

    def versions(self) -> tuple[FragmentVersion, ...]:
        """The present versions of all fragments: a consistent cut, since merges are never half visible."""
        return tuple(self[p] for p in range(len(self._present)))

    def load(
        self,
        fragment: int,
        theta: NDArray[np.float32],
        counters: NDArray[np.int64],
        *,
        version: int = 0,
        momentum: NDArray[np.float32] | None = None,
    ) -> None:
        """Set a fragment, from the first learner's model or from a checkpoint.

        Raises:
            LayoutMismatch: if the lengths are not those of the layout.
        """
        wanted = self.layout.fragments[fragment]
        if len(theta) != wanted.num_elements or len(counters) != wanted.num_counters:
            raise LayoutMismatch(
                f"fragment {fragment} must have {wanted.num_elements} floats and {wanted.num_counters} counters; "
                f"got {len(theta)} and {len(counters)}"
            )
        if momentum is None and self._outer.optimizer == "nesterov":
            momentum = np.zeros_like(theta)
        if self._outer.optimizer == "sgd":
            momentum = None
        self._present[fragment] = FragmentVersion(version, theta, momentum, counters, self._encode(theta))

    def step(self, fragment: int, version: int, inputs: Sequence[Input]) -> StepResult:
        """Merge contributions and take the outer step; does not change the present version.

        A contribution with a NaN or Inf is left out, named, and the merge is repeated without it. Runs in a worker
        thread; the kernel releases the GIL.

        Args:
            fragment: which.
            version: number of the new version.
            inputs: sorted by learner_id, so that equal inputs give bit-equal results.
        """
        old = self[fragment]
        rejected: list[tuple[int, str]] = []
        inputs = [i for i in inputs if self._fits(fragment, i, rejected)]
        while inputs:
            theta = np.empty_like(old.theta)
            momentum = None if old.momentum is None else np.empty_like(old.momentum)
            wire = theta if self._wire == "f32" else np.empty(len(theta), dtype=np.uint16)
            report = merge_outer_step(
                [i.floats for i in inputs],
                np.array([i.weight for i in inputs], dtype=np.float64),
                self._offsets[fragment],
                self._rules[fragment],
                old.theta,
                old.momentum,
                outer=self._outer,
                theta_out=theta,
                momentum_out=momentum,
                wire_out=None if wire is theta else wire,
                backend=self._backend,
            )
            if report.finite.all() and report.theta_finite:
                furthest = max(inputs, key=lambda i: (i.step, -i.learner_id))
                new = FragmentVersion(version, theta, momentum, furthest.counters.copy(), wire)
                return StepResult(fragment, new, tuple(rejected), report)
            if report.finite.all():
                rejected += [(i.learner_id, "the merged fragment left the range of float32") for i in inputs]
                break
            bad = {i.learner_id for i, finite in zip(inputs, report.finite, strict=True) if not finite}
            rejected += [(m, "a NaN or Inf in its outer gradient") for m in sorted(bad)]
            inputs = [i for i in inputs if i.learner_id not in bad]
        return StepResult(fragment, None, tuple(rejected), None)

    def commit(self, result: StepResult) -> None:
        """Make the new version the present one."""
        if result.new is not None:
            self._present[result.fragment] = result.new

    def _fits(self, fragment: int, i: Input, rejected: list[tuple[int, str]]) -> bool:
        wanted = self.layout.fragments[fragment]
        fits = len(i.floats) == wanted.num_elements and len(i.counters) == wanted.num_counters
        if not fits:
            rejected.append((i.learner_id, f"{len(i.floats)} floats where {wanted.num_elements} are required"))
        return fits

    def _encode(self, theta: NDArray[np.float32]) -> NDArray[Any]:
        if self._wire == "f32":
            return theta
        bits = np.empty(len(theta), dtype=np.uint16)
        encode_bf16(theta, None, bits, backend=self._backend)
        return bits
