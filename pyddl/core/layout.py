"""From a model's tensors to fragments, the unit that is pushed, merged and published (paper: fragments).

Here: the description of tensors, the three ways of cutting them into fragments, the fingerprint by which
learners and syncer know that they speak of the same model, and the cut of a fragment among a learner's ranks.
Not here: tensors themselves (run/replica.py copies them in and out), their bytes on the wire
(link/mailbox.py) and the merge (kernels.py, state.py). Standard library and numpy only.

Every learner computes its layout by itself, so nothing here may depend on hashing, on time or on the machine:
ties are broken by name, then by fragment index.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, LayoutMismatch, ShapeError

__all__ = [
    "ALIGNMENT",
    "DEFAULT_NUM_FRAGMENTS",
    "POLICIES",
    "ROLES",
    "Fragment",
    "Layout",
    "Segment",
    "TensorSpec",
    "build_layout",
    "slice_bounds",
]

ALIGNMENT = 16
"""Elements; cuts within a tensor or a fragment fall on multiples: 64 bytes of float32, a cache line."""

DEFAULT_NUM_FRAGMENTS = 24
"""P of the paper."""

POLICIES = ("balanced", "layer", "tensor")
ROLES = ("parameter", "embedding", "buffer", "counter", "frozen")
_TRAINABLE = ("parameter", "embedding")
_FLOATING = ("parameter", "embedding", "buffer")
_MAX_FRAGMENTS = (1 << 16) - 1  # a fragment's index has 16 bits in a board word
_FORMAT = "pyddl layout 1"

_FLOAT_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
_INTEGER_BYTES = {
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
_COMPLEX_BYTES = {"complex64": 8, "complex128": 16}  # frozen tensors only: there is no merge for them
_ITEM_BYTES = {**_FLOAT_BYTES, **_INTEGER_BYTES, **_COMPLEX_BYTES}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model, as every learner must have it.

    Attributes:
        name: its first name in the model.
        shape: its dimensions, each >= 0; () is a scalar of one element.
        dtype: its type by name, such as "float32" or "bfloat16".
        role: "parameter", "embedding" (merged by mean), "buffer" (floating), "counter" (integer or
            bool buffer), or "frozen" (compared, never sent).
        aliases: its other names, when weights are tied.

    Raises:
        ConfigError: for an unknown role or dtype, a dtype that the role forbids, or a negative dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"the role of tensor {self.name!r} must be one of {', '.join(ROLES)}; got {self.role!r}")
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"the dimensions of tensor {self.name!r} must be 0 or more; got {self.shape}")
        if self.role in _FLOATING:
            allowed, advice = _FLOAT_BYTES, "freeze it or give it a floating dtype"
        elif self.role == "counter":
            allowed, advice = _INTEGER_BYTES, "only integer and bool buffers are counters"
        else:
            allowed, advice = _ITEM_BYTES, "convert it"
        if self.dtype not in allowed:
            raise ConfigError(
                f"tensor {self.name!r} ({self.role}) must be of type {', '.join(allowed)}; got {self.dtype!r}; {advice}"
            )

    @property
    def num_elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size in its own dtype, in bytes."""
        return self.num_elements * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Segment:
    """A piece of one tensor within a fragment.

    Attributes:
        tensor: index into :attr:`Layout.tensors`.
        start: first element, of the tensor flattened in logical (row-major) order.
        stop: one past the last element.
        offset: where the piece begins in the fragment's float vector, in elements.
    """

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Its number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    """What one round moves: a float vector, and integer counters beside it.

    Attributes:
        index: p, 0..P-1.
        segments: the float vector's pieces, ordered by (tensor, start); they fill it without a gap.
        num_elements: length of the float vector, >= 1.
        counters: (tensor index, number of elements) of integer buffers, each element sent as int64.
    """

    index: int
    segments: tuple[Segment, ...]
    num_elements: int
    counters: tuple[tuple[int, int], ...] = ()

    @property
    def num_counters(self) -> int:
        """Number of int64 values beside the float vector."""
        return sum(count for _, count in self.counters)

    def offsets(self) -> NDArray[np.int64]:
        """Where each segment begins in the float vector, then the vector's length: [T+1] int64."""
        return np.array([*(segment.offset for segment in self.segments), self.num_elements], dtype=np.int64)

    def rules(self, layout: Layout, merge_rule: str) -> NDArray[np.uint8]:
        """How each segment is merged (paper: embedding-like tensors by mean, all else by RDA).

        Args:
            layout: the layout that this fragment is of.
            merge_rule: "rda" or "mean", for parameters.

        Returns:
            [T] uint8, the ``RULE_*`` of core/kernels.py, one per segment.

        Raises:
            ConfigError: for another ``merge_rule``.
        """
        # Imported here, so that a layout alone never loads pyddl._C.
        from .kernels import RULE_BUFFER, RULE_MEAN, RULE_RDA

        if merge_rule not in ("rda", "mean"):
            raise ConfigError(f"the merge rule must be rda or mean; got {merge_rule!r}; set sync.merge_rule")
        by_role = {
            "parameter": RULE_RDA if merge_rule == "rda" else RULE_MEAN,
            "embedding": RULE_MEAN,
            "buffer": RULE_BUFFER,
        }
        return np.array([by_role[layout.tensors[s.tensor].role] for s in self.segments], dtype=np.uint8)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model and their fragments.

    Attributes:
        tensors: in the order of the model.
        fragments: by index; together they hold every element once, but for frozen tensors.
        policy: the way of cutting, one of ``POLICIES``.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    policy: str

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of tensors, in their order, and fragments: equal where two models can be merged."""
        text = json.dumps(self._document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def num_elements(self) -> int:
        """Floats in all fragments together."""
        return sum(fragment.num_elements for fragment in self.fragments)

    @property
    def largest_fragment_elements(self) -> int:
        """Floats in the largest fragment: what a mailbox slot must hold."""
        return max(fragment.num_elements for fragment in self.fragments)

    @property
    def largest_counters(self) -> int:
        """Counters (int64) in the fragment that has the most of them."""
        return max(fragment.num_counters for fragment in self.fragments)

    def to_json(self) -> str:
        """The layout as JSON text, the same for equal layouts; :meth:`from_json` reads it."""
        document = {
            "format": _FORMAT,
            "policy": self.policy,
            "fingerprint": self.fingerprint,
            **self._document(),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what :meth:`to_json` wrote, and check it as one checks what comes from somebody else.

        Raises:
            LayoutMismatch: if the text is no layout, is damaged, or does not hold every element once.
        """
        try:
            document = json.loads(text)
            if not isinstance(document, dict) or document.get("format") != _FORMAT:
                raise _Malformed(f"its format is not {_FORMAT!r}")
            layout = cls(
                tensors=tuple(_read_tensor(item) for item in document["tensors"]),
                fragments=tuple(_read_fragment(i, item) for i, item in enumerate(document["fragments"])),
                policy=document["policy"],
            )
            _check_cover(layout)
            if layout.fingerprint != document["fingerprint"]:
                raise _Malformed("its fingerprint is not that of its content")
        except _Malformed as error:
            reason = str(error)
        except json.JSONDecodeError as error:
            reason = f"it is not JSON ({error})"
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return layout
        raise LayoutMismatch(
            f"a layout must be whole and in the format that this version of pyddl writes; {reason}; "
            "use the same version of pyddl everywhere, or another checkpoint"
        )

    def _document(self) -> dict[str, Any]:
        return {
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "role": t.role,
                    "aliases": list(t.aliases),
                }
                for t in self.tensors
            ],
            "fragments": [
                {
                    "segments": [[s.tensor, s.start, s.stop, s.offset] for s in fragment.segments],
                    "counters": [list(counter) for counter in fragment.counters],
                }
                for fragment in self.fragments
            ],
        }


# ---------------------------------------------------------------- cutting


def build_layout(specs: Iterable[TensorSpec], *, num_fragments: int = 0, policy: str = "balanced") -> Layout:
    """Cut a model into fragments (paper: layer-wise, tensor-wise and balanced tensor fragmentation).

    "balanced" packs greedily, the largest tensor first into the fragment that is smallest so far; a tensor
    larger than its fair share, ceil(total / P), is first split [ours]. "layer" keeps the tensors of a layer
    together and gives each fragment a run of layers; a layer is a name up to its first number ("blocks.3"),
    or a module where there is none. "tensor" deals whole tensors out, largest first.

    Args:
        specs: every tensor of the model, in its order, tied ones once.
        num_fragments: P; 0: min(24, number of trainable tensors), by layer min(24, number of layers).
        policy: one of ``POLICIES``.

    Returns:
        The layout; the same for the same arguments, on every machine.

    Raises:
        ConfigError: for names that occur twice, a model with nothing to train, an unknown policy, or a P that
            would leave a fragment empty.
    """
    tensors = tuple(specs)
    if policy not in POLICIES:
        raise ConfigError(
            f"the fragmentation must be one of {', '.join(POLICIES)}; got {policy!r}; set sync.fragmentation"
        )
    if not 0 <= num_fragments <= _MAX_FRAGMENTS:
        raise ConfigError(
            f"the number of fragments must be 0 (chosen by size) to {_MAX_FRAGMENTS}; got {num_fragments}; "
            "set sync.num_fragments"
        )
    _check_names(tensors)
    num_trainable = sum(spec.role in _TRAINABLE and spec.num_elements > 0 for spec in tensors)
    if num_trainable == 0:
        raise ConfigError(
            f"a model must have at least one trainable parameter with elements; got {len(tensors)} tensors, "
            "none of them so; set requires_grad before the model is attached"
        )
    floats = [i for i, spec in enumerate(tensors) if spec.role in _FLOATING and spec.num_elements > 0]
    counters = [i for i, spec in enumerate(tensors) if spec.role == "counter" and spec.num_elements > 0]
    if policy == "layer":
        bins, counter_bins = _cut_by_layer(tensors, floats, counters, num_fragments)
    else:
        chosen = num_fragments or min(DEFAULT_NUM_FRAGMENTS, num_trainable)
        cut = _cut_balanced if policy == "balanced" else _cut_by_tensor
        bins = cut(tensors, floats, chosen)
        counter_bins = _place_counters(tensors, counters, chosen)
    fragments = tuple(
        _make_fragment(index, pieces, [(i, tensors[i].num_elements) for i in sorted(beside)])
        for index, (pieces, beside) in enumerate(zip(bins, counter_bins, strict=True))
    )
    return Layout(tensors, fragments, policy)


def slice_bounds(num_elements: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The part of a fragment that one rank of a learner sends and fetches.

    The slices of all ranks cover the fragment exactly, in order, and start on multiples of ``ALIGNMENT``; a
    fragment with fewer blocks than ranks leaves some of them empty.

    Args:
        num_elements: length of the fragment's float vector, >= 0.
        num_ranks: G, >= 1.
        rank: 0..G-1, within the learner.

    Returns:
        (start, stop), in elements.

    Raises:
        ShapeError: if an argument is out of its range.
    """
    if num_elements < 0 or num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ShapeError(
            "a slice needs num_elements >= 0, num_ranks >= 1 and 0 <= rank < num_ranks; got num_elements "
            f"{num_elements}, num_ranks {num_ranks}, rank {rank}; pass the rank within its learner"
        )
    num_blocks = -(-num_elements // ALIGNMENT)
    start, stop = (min(num_elements, num_blocks * r // num_ranks * ALIGNMENT) for r in (rank, rank + 1))
    return start, stop


_Piece = tuple[int, int, int]  # tensor, start, stop


def _cut_balanced(tensors: Sequence[TensorSpec], floats: list[int], num_fragments: int) -> list[list[_Piece]]:
    """Greedy bin packing (paper: balanced tensor), after splitting what exceeds a fair share."""
    total = sum(tensors[i].num_elements for i in floats)
    fair_share = -(-total // num_fragments)
    # Rounded down, so that a model of one tensor still yields P pieces; a piece has one aligned block.
    limit = max(ALIGNMENT, total // num_fragments // ALIGNMENT * ALIGNMENT)
    pieces: list[_Piece] = []
    for i in floats:
        size = tensors[i].num_elements
        num_pieces = -(-size // limit) if size > fair_share else 1
        for k in range(num_pieces):
            pieces.append((i, *slice_bounds(size, num_pieces, k)))
    _require_filled(num_fragments, len(pieces), "pieces of tensors")
    pieces.sort(key=lambda piece: (piece[1] - piece[2], tensors[piece[0]].name, piece[1]))
    bins: list[list[_Piece]] = [[] for _ in range(num_fragments)]
    smallest_first = [(0, index) for index in range(num_fragments)]
    for piece in pieces:
        filled, index = smallest_first[0]
        bins[index].append(piece)
        heapq.heapreplace(smallest_first, (filled + piece[2] - piece[1], index))
    return bins


def _cut_by_tensor(tensors: Sequence[TensorSpec], floats: list[int], num_fragments: int) -> list[list[_Piece]]:
    """Whole tensors in turn, largest first (paper: tensor-wise fragmentation)."""
    _require_filled(num_fragments, len(floats), "tensors")
    order = sorted(floats, key=lambda i: (-tensors[i].num_elements, tensors[i].name))
    bins: list[list[_Piece]] = [[] for _ in range(num_fragments)]
    for k, i in enumerate(order):
        bins[k % num_fragments].append((i, 0, tensors[i].num_elements))
    return bins


def _cut_by_layer(
    tensors: Sequence[TensorSpec], floats: list[int], counters: list[int], num_fragments: int
) -> tuple[list[list[_Piece]], list[list[int]]]:
    """Runs of layers, as many in each fragment as in the next (paper: layer-wise fragmentation)."""
    layers: dict[str, int] = {}
    for i in floats:
        layers.setdefault(_layer_of(tensors[i].name), len(layers))
    if not num_fragments:
        num_fragments = min(DEFAULT_NUM_FRAGMENTS, len(layers))
    _require_filled(num_fragments, len(layers), "layers")
    bins: list[list[_Piece]] = [[] for _ in range(num_fragments)]
    counter_bins: list[list[int]] = [[] for _ in range(num_fragments)]
    layer = 0
    for i in sorted([*floats, *counters]):
        # A counter of a layer without floats goes with the layer before it.
        layer = layers.get(_layer_of(tensors[i].name), layer)
        index = layer * num_fragments // len(layers)
        if tensors[i].role == "counter":
            counter_bins[index].append(i)
        else:
            bins[index].append((i, 0, tensors[i].num_elements))
    return bins, counter_bins


def _layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, else the module that holds it."""
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: k + 1])
    return ".".join(parts[:-1]) or name


def _place_counters(tensors: Sequence[TensorSpec], counters: list[int], num_fragments: int) -> list[list[int]]:
    """Spread integer buffers so that no fragment carries many: each into the one with the fewest."""
    bins: list[list[int]] = [[] for _ in range(num_fragments)]
    fewest_first = [(0, index) for index in range(num_fragments)]
    for i in sorted(counters, key=lambda i: (-tensors[i].num_elements, tensors[i].name)):
        filled, index = fewest_first[0]
        bins[index].append(i)
        heapq.heapreplace(fewest_first, (filled + tensors[i].num_elements, index))
    return bins


def _make_fragment(index: int, pieces: list[_Piece], counters: list[tuple[int, int]]) -> Fragment:
    segments: list[Segment] = []
    offset = 0
    for tensor, start, stop in sorted(pieces):
        # Neighbouring pieces become one segment again: RDA looks at a segment's norm, and fewer are faster.
        if segments and segments[-1].tensor == tensor and segments[-1].stop == start:
            segments[-1] = Segment(tensor, segments[-1].start, stop, segments[-1].offset)
        else:
            segments.append(Segment(tensor, start, stop, offset))
        offset += stop - start
    return Fragment(index, tuple(segments), offset, tuple(counters))


def _require_filled(num_fragments: int, num_items: int, what: str) -> None:
    if num_fragments > num_items:
        raise ConfigError(
            f"every fragment must hold something: this model's {what} fill at most {num_items}; got "
            f"{num_fragments} fragments; set sync.num_fragments to {num_items} or less, or to 0"
        )


def _check_names(tensors: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in tensors:
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise ConfigError(
                    f"every tensor must have a name of its own; {name!r} came twice; give a tied tensor "
                    "once, with its other names as aliases"
                )
            seen.add(name)


# ---------------------------------------------------------------- reading


class _Malformed(Exception):
    """What is wrong with a layout's text, in words."""


def _integers(values: Any, count: int | None = None) -> list[int]:
    # bool is an int to isinstance, and a float such as 1.0 equals one: neither is written by to_json.
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise _Malformed(f"a list of numbers was expected, {values!r} stands there")
    if count is not None and len(values) != count:
        raise _Malformed(f"{count} numbers were expected, {values!r} stands there")
    return values


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"a word was expected, {value!r} stands there")
    return value


def _read_tensor(item: dict[str, Any]) -> TensorSpec:
    return TensorSpec(
        name=_string(item["name"]),
        shape=tuple(_integers(item["shape"])),
        dtype=_string(item["dtype"]),
        role=_string(item["role"]),
        aliases=tuple(_string(alias) for alias in item["aliases"]),
    )


def _read_fragment(index: int, item: dict[str, Any]) -> Fragment:
    segments = tuple(Segment(*_integers(segment, 4)) for segment in item["segments"])
    counters = tuple((tensor, count) for tensor, count in (_integers(pair, 2) for pair in item["counters"]))
    return Fragment(index, segments, sum(s.num_elements for s in segments), counters)


def _check_cover(layout: Layout) -> None:
    """Raise _Malformed unless the fragments hold every element that is to travel exactly once, in order."""
    if layout.policy not in POLICIES:
        raise _Malformed(f"its policy is {layout.policy!r}")
    _check_names(layout.tensors)
    if not 1 <= len(layout.fragments) <= _MAX_FRAGMENTS:
        raise _Malformed(f"it has {len(layout.fragments)} fragments")
    spans: dict[int, list[tuple[int, int]]] = {}
    counted: dict[int, int] = {}
    for fragment in layout.fragments:
        offset = 0
        for s in fragment.segments:
            if s.offset != offset or s.stop <= s.start:
                raise _Malformed(f"the segments of fragment {fragment.index} do not follow one another")
            offset = s.offset + s.num_elements
            spans.setdefault(s.tensor, []).append((s.start, s.stop))
        order = [(s.tensor, s.start) for s in fragment.segments]
        if not order or order != sorted(order):
            raise _Malformed(f"the segments of fragment {fragment.index} are missing or out of order")
        if list(fragment.counters) != sorted(fragment.counters):
            raise _Malformed(f"the counters of fragment {fragment.index} are out of order")
        for tensor, count in fragment.counters:
            if tensor in counted:
                raise _Malformed(f"tensor {tensor} is counted twice")
            counted[tensor] = count
    for i, spec in enumerate(layout.tensors):
        position = 0
        for start, stop in sorted(spans.pop(i, [])):
            if start != position:
                raise _Malformed(f"elements of {spec.name!r} are in no fragment or in two")
            position = stop
        if position != (spec.num_elements if spec.role in _FLOATING else 0):
            raise _Malformed(f"the fragments hold {position} elements of {spec.name!r} {list(spec.shape)}")
        if counted.pop(i, 0) != (spec.num_elements if spec.role == "counter" else 0):
            raise _Malformed(f"the counters of {spec.name!r} are not all there")
    if spans or counted:
        raise _Malformed("a fragment names a tensor that does not exist")
