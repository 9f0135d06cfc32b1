"""Merge with outer step, codecs, checksum and atomic words on numpy arrays: the door to ``pyddl._C``.

Here: one public function per kernel, every check of its arguments, the choice of the backend. Not here: the
numpy versions (core/reference.py), and what a fragment, a learner or a round is.

``backend`` is ``cpu`` (C++; :class:`KernelUnavailable` if it is not built), ``reference`` (numpy), or
``auto``: C++, else the reference after one warning. The C++ releases the interpreter's lock while it works.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, KernelUnavailable, ShapeError
from . import reference

_C: ModuleType | None
_MISSING: str
try:
    from pyddl import _C
except ImportError as _error:  # a source tree that was never built, or a build for another Python
    _C, _MISSING = None, str(_error)
else:
    _MISSING = ""

__all__ = [
    "BACKENDS",
    "BLOCK",
    "BLOCK_CODECS",
    "RULE_BUFFER",
    "RULE_MEAN",
    "RULE_RDA",
    "Blocks",
    "MergeReport",
    "OuterStep",
    "checksum",
    "copy",
    "copy_with_checksum",
    "decode_bf16",
    "decode_blocks",
    "describe_backends",
    "encode_bf16",
    "encode_blocks",
    "encoded_bytes",
    "load_word",
    "load_words",
    "merge_outer_step",
    "num_threads",
    "set_num_threads",
    "store_word",
]

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "reference")

BLOCK_CODECS = ("int8", "int4")
"""Codecs of blocks with a scale each; csrc/element.h describes them. int4 is E3M0: sign, 3 bits of exponent."""
BLOCK = reference.BLOCK
"""Values of a block; slices of a vector in blocks begin at multiples of it."""

RULE_MEAN = 0
"""Weighted mean, then the outer step."""
RULE_RDA = 1
"""Radial-directional averaging (paper, App. D), then the outer step."""
RULE_BUFFER = 2
"""Weighted mean taken over as it is: outer lr 1, no momentum (running statistics are no gradients)."""

_ELEMENTS = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}  # of csrc/element.h
_has_warned = False

# Made once: comparing a dtype with a type builds a dtype each time.
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_U8, _U16, _U64 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint64)
_I64 = np.dtype(np.int64)


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer of one step.

    Attributes:
        optimizer: sgd (no momentum) or nesterov, as ``torch.optim.SGD(nesterov=True)`` with a buffer that
            starts at 0.
        lr: outer learning rate, > 0.
        momentum: 0 <= momentum < 1; used by nesterov only.
    """

    optimizer: Literal["sgd", "nesterov"]
    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "nesterov"):
            raise ConfigError(f"the outer optimizer must be sgd or nesterov; got {self.optimizer!r}; choose one")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"the outer lr must be positive and finite; got {self.lr}; 1 and 0.7 are usual")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum must be in [0, 1); got {self.momentum}; 0.9 is usual")


@dataclass(frozen=True, eq=False)
class Blocks:
    """An outer gradient as :func:`encode_blocks` has encoded it.

    Attributes:
        codec: int8 or int4.
        data: [encoded_bytes(codec, n)] uint8.
    """

    codec: str
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class MergeReport:
    """What a merge found.

    Attributes:
        finite: [M] bool, contributor i has neither NaN nor Inf. If any is False the outputs are unspecified
            and the caller repeats without it.
        norms: [M] float64, norm of each contributor's outer gradient over the whole fragment; not finite
            where ``finite`` is False.
        merged_norm: norm of the merged outer gradient over the whole fragment; unspecified unless all are
            finite.
        cancelled: number of tensors whose directions cancelled, so that RDA fell back to the mean.
        theta_finite: every element of theta_out is finite. False with finite contributions: a sum left the
            range of float32, and the outputs must not be published.
    """

    finite: NDArray[np.bool_]
    norms: NDArray[np.float64]
    merged_norm: float
    cancelled: int
    theta_finite: bool


def merge_outer_step(
    contributions: Sequence[NDArray[Any] | Blocks],
    weights: NDArray[np.float64],
    segments: NDArray[np.int64],
    rules: NDArray[np.uint8],
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32] | None,
    *,
    outer: OuterStep,
    theta_out: NDArray[np.float32],
    momentum_out: NDArray[np.float32] | None,
    wire_out: NDArray[Any] | None = None,
    backend: str = "auto",
) -> MergeReport:
    """Merge one fragment's outer gradients by weight and take the outer step (paper, sec. 3.2, App. D).

    Out of place: with an outer gradient g = anchor - theta_learner the step is theta_out = theta - lr * g for
    sgd, and for nesterov b = mu * momentum + g, theta_out = theta - lr * (g + mu * b). Sums are in float64.
    Bit-equal for equal inputs on one backend, whatever instruction set the C++ runs on. All arrays are
    C-contiguous.

    Args:
        contributions: M >= 1 outer gradients by learner_id: arrays [n], float32 or uint16 (bits of bf16), or
            :class:`Blocks` of n values.
        weights: [M] float64, each > 0 and finite; normalised here.
        segments: [T+1] int64, element offsets of the T tensors in the fragment: first 0, last n, ascending.
        rules: [T] uint8, RULE_MEAN, RULE_RDA or RULE_BUFFER.
        theta: [n] float32, the global fragment.
        momentum: [n] float32, or None with sgd.
        outer: the outer optimizer.
        theta_out: [n] float32, written; overlaps no other array.
        momentum_out: [n] float32, written; None if and only if momentum is. Sgd and RULE_BUFFER copy
            momentum.
        wire_out: [n] float32 or uint16 (bf16), written with a copy of theta_out; None: not wanted.
        backend: auto, cpu or reference.

    Returns:
        A :class:`MergeReport`.

    Raises:
        ShapeError: a wrong length, dtype, memory order, or an output that overlaps another array; a weight
            that is not positive and finite.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    n = _require_array("theta", theta, (_F32,))
    if not contributions:
        raise ShapeError("a merge needs at least one contribution; got none; do not merge an empty round")
    encoded = [_encoded(f"contributions[{i}]", contribution, n) for i, contribution in enumerate(contributions)]
    weights = np.asarray(weights)
    _require_array("weights", weights, (_F64,), len(contributions))
    if not bool(np.all((weights > 0) & np.isfinite(weights))):
        raise ShapeError(
            f"weights must be positive and finite; got {weights.tolist()}; leave out a learner that counted no tokens"
        )
    num_tensors = _require_array("rules", rules, (_U8,))
    _require_array("segments", segments, (_I64,), num_tensors + 1)
    if segments[0] != 0 or segments[-1] != n or bool(np.any(segments[1:] < segments[:-1])):
        raise ShapeError(
            f"segments must ascend from 0 to n = {n}; got {_shorten(segments)}; pass the offsets of this fragment"
        )
    if num_tensors and int(rules.max()) > RULE_BUFFER:
        raise ShapeError(f"rules must be 0 (mean), 1 (RDA) or 2 (buffer); got {int(rules.max())}; use kernels.RULE_*")
    outputs: dict[str, NDArray[Any]] = {"theta_out": theta_out}
    inputs: dict[str, NDArray[Any]] = {
        "theta": theta,
        "weights": weights,
        "segments": segments,
        "rules": rules,
    }
    inputs.update((f"contributions[{i}]", array) for i, (_, array) in enumerate(encoded))
    _require_array("theta_out", theta_out, (_F32,), n, writable=True)
    if (momentum is None) != (momentum_out is None) or (momentum is None and outer.optimizer == "nesterov"):
        raise ShapeError(
            "momentum and momentum_out must both be given (with sgd both may be None); got "
            f"momentum {_presence(momentum)}, momentum_out {_presence(momentum_out)} "
            f"with {outer.optimizer}; pass both"
        )
    if momentum is not None and momentum_out is not None:
        _require_array("momentum", momentum, (_F32,), n)
        _require_array("momentum_out", momentum_out, (_F32,), n, writable=True)
        inputs["momentum"] = momentum
        outputs["momentum_out"] = momentum_out
    if wire_out is not None:
        _require_array("wire_out", wire_out, (_F32, _U16), n, writable=True)
        outputs["wire_out"] = wire_out
    _refuse_overlap(outputs, inputs)

    nesterov = outer.optimizer == "nesterov"
    if native is None:
        found = reference.merge_outer_step(
            encoded,
            weights,
            segments,
            rules,
            theta,
            momentum,
            nesterov=nesterov,
            lr=outer.lr,
            mu=outer.momentum,
            theta_out=theta_out,
            momentum_out=momentum_out,
            wire_out=wire_out,
        )
    else:
        found = native.merge_outer_step(
            [array for _, array in encoded],
            [_ELEMENTS[codec] for codec, _ in encoded],
            weights.tolist(),
            n,
            segments,
            rules,
            theta,
            momentum,
            theta_out,
            momentum_out,
            wire_out,
            wire_out is not None and wire_out.dtype == _U16,
            nesterov,
            outer.lr,
            outer.momentum,
        )
    finite, norms, merged_norm, cancelled, theta_finite = found
    return MergeReport(
        finite=np.array(finite, np.bool_),
        norms=np.array(norms, np.float64),
        merged_norm=merged_norm,
        cancelled=cancelled,
        theta_finite=theta_finite,
    )


def num_threads() -> int:
    """Threads that the C++ kernels use: OMP_NUM_THREADS, else the processors this process may run on; 1 in numpy."""
    return 1 if _C is None else int(_C.num_threads())


def set_num_threads(count: int) -> None:
    """Let the C++ kernels use so many threads from now on; 0: as :func:`num_threads` finds. No result depends on it.

    Raises:
        ShapeError: if count is negative.
    """
    if count < 0:
        raise ShapeError(f"the number of threads must be at least 0 (as found); got {count}; pass 0 or more")
    if _C is not None:
        _C.set_num_threads(count)


def encode_bf16(
    values: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    out_bits: NDArray[np.uint16],
    backend: str = "auto",
) -> None:
    """Round x = values + residual to bf16 and keep in ``residual`` what was lost (error feedback).

    Args:
        values: [n] float32, an outer gradient.
        residual: [n] float32, read and written: x minus what out_bits stand for, 0 where that is not finite.
            None: nothing is carried, x = values.
        out_bits: [n] uint16, written: bf16 bits, to nearest with ties to even; NaN stays NaN. Overlaps
            nothing.
        backend: auto, cpu or reference.

    Raises:
        ShapeError: a wrong length, dtype, memory order or an overlap.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    n = _require_array("values", values, (_F32,))
    outputs: dict[str, NDArray[Any]] = {"out_bits": out_bits}
    _require_array("out_bits", out_bits, (_U16,), n, writable=True)
    if residual is not None:
        _require_array("residual", residual, (_F32,), n, writable=True)
        outputs["residual"] = residual
    _refuse_overlap(outputs, {"values": values})
    if native is not None:
        native.encode_bf16(values, residual, out_bits)
    elif residual is None:
        out_bits[:] = reference.encode_bf16(values)
    else:
        out_bits[:] = reference.encode_bf16_with_residual(values, residual)


def decode_bf16(bits: NDArray[np.uint16], out: NDArray[np.float32], backend: str = "auto") -> None:
    """Widen bf16 bits to float32, exactly.

    Args:
        bits: [n] uint16.
        out: [n] float32, written; does not overlap bits.
        backend: auto, cpu or reference.

    Raises:
        ShapeError: a wrong length, dtype, memory order or an overlap.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    n = _require_array("bits", bits, (_U16,))
    _require_array("out", out, (_F32,), n, writable=True)
    _refuse_overlap({"out": out}, {"bits": bits})
    if native is not None:
        native.decode_bf16(bits, out)
    else:
        out[:] = reference.decode_bf16(bits)


def encoded_bytes(codec: str, n: int) -> int:
    """Bytes of n values in a codec: f32, bf16, int8 or int4.

    Raises:
        ConfigError: if there is no such codec.
    """
    if codec not in _ELEMENTS:
        raise ConfigError(f"a codec must be one of {', '.join(_ELEMENTS)}; got {codec!r}; choose one")
    if codec in BLOCK_CODECS:
        return -(-n // BLOCK) * reference.BLOCK_BYTES[codec]
    return n * (4 if codec == "f32" else 2)


def encode_blocks(
    codec: str,
    values: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    out: NDArray[np.uint8],
    backend: str = "auto",
) -> None:
    """Encode x = values + residual in blocks and keep in ``residual`` what that lost (error feedback).

    Both backends give the same bytes. int8 rounds to nearest even, int4 to the nearest of 0 and +-scale * 2^0..6.

    Args:
        codec: int8 or int4.
        values: [n] float32, an outer gradient.
        residual: [n] float32, read and written: x minus what ``out`` stands for; 0 in a block that holds a NaN or Inf,
            which decodes to NaN. None: nothing is carried, x = values.
        out: [encoded_bytes(codec, n)] uint8, written; overlaps nothing.
        backend: auto, cpu or reference.

    Raises:
        ConfigError: if ``codec`` is none of blocks.
        ShapeError: a wrong length, dtype, memory order or an overlap.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    _require_blocks(codec)
    n = _require_array("values", values, (_F32,))
    outputs: dict[str, NDArray[Any]] = {"out": out}
    _require_array("out", out, (_U8,), encoded_bytes(codec, n), writable=True)
    if residual is not None:
        _require_array("residual", residual, (_F32,), n, writable=True)
        outputs["residual"] = residual
    _refuse_overlap(outputs, {"values": values})
    if native is not None:
        native.encode_blocks(_ELEMENTS[codec], values, residual, out)
    else:
        reference.encode_blocks(codec, values, residual, out)


def decode_blocks(codec: str, blocks: NDArray[np.uint8], out: NDArray[np.float32], backend: str = "auto") -> None:
    """Decode blocks, each value rounded to float32.

    Args:
        codec: int8 or int4.
        blocks: [encoded_bytes(codec, n)] uint8.
        out: [n] float32, written; does not overlap blocks.
        backend: auto, cpu or reference.

    Raises:
        ConfigError: if ``codec`` is none of blocks.
        ShapeError: a wrong length, dtype, memory order or an overlap.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    _require_blocks(codec)
    n = _require_array("out", out, (_F32,), writable=True)
    _require_array("blocks", blocks, (_U8,), encoded_bytes(codec, n))
    _refuse_overlap({"out": out}, {"blocks": blocks})
    if native is not None:
        native.decode_blocks(_ELEMENTS[codec], blocks, out)
    else:
        out[:] = reference.decode_blocks(codec, blocks, n)


def checksum(buffer: Any, value: int = 0, backend: str = "auto") -> int:
    """Return the CRC32C (Castagnoli, as in iSCSI) of a buffer's bytes.

    To go on, pass the result as ``value``: the checksum of a followed by b is that of b with the value of a.

    Args:
        buffer: any C-contiguous object with a buffer: array, bytes, memoryview.
        value: checksum of what came before, 0 to 2**32 - 1; 0 starts anew.
        backend: auto, cpu or reference.

    Returns:
        The checksum, 0 to 2**32 - 1.

    Raises:
        ShapeError: the buffer is not C-contiguous, or value is out of range.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    if not 0 <= value < 1 << 32:
        raise ShapeError(f"a checksum to go on from must be in 0 .. 2**32 - 1; got {value}; pass an earlier result")
    if native is not None:
        return int(native.checksum(buffer, value))
    try:
        view = memoryview(buffer)
    except TypeError:
        view = None
    if view is None or not view.c_contiguous:
        raise ShapeError(
            f"a checksum needs a C-contiguous buffer; got {type(buffer).__name__}; pass an array, bytes or a memoryview"
        )
    return reference.checksum(view, value)


def copy(source: NDArray[Any], target: NDArray[Any], backend: str = "auto") -> None:
    """Copy bytes; from 256 KiB on past the caches, which spares reading what is overwritten.

    Args:
        source: any C-contiguous array.
        target: one of as many bytes, written; does not overlap source.
        backend: auto, cpu or reference.

    Raises:
        ShapeError: a wrong length or memory order, or an overlap.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    if native is not None:  # which checks the arguments itself: small parameters are many
        native.copy(source, target)
        return
    parts = []
    for name, array in (("source", source), ("target", target)):
        if not array.flags.c_contiguous:
            raise ShapeError(f"{name} must be a C-contiguous array; got a strided view; copy it first")
        parts.append(array.reshape(-1).view(np.uint8))
    _require_array("target", parts[1], (_U8,), len(parts[0]), writable=True)
    _refuse_overlap({"target": target}, {"source": source})
    parts[1][:] = parts[0]


def copy_with_checksum(
    source: NDArray[np.uint8], target: NDArray[np.uint8], value: int = 0, backend: str = "auto"
) -> int:
    """Copy bytes and return their CRC32C, in one pass.

    Args:
        source: [n] uint8.
        target: [n] uint8, written; does not overlap source.
        value: checksum of what came before; 0 starts anew.
        backend: auto, cpu or reference.

    Returns:
        The checksum, as of :func:`checksum`.

    Raises:
        ShapeError: a wrong length, dtype, memory order or an overlap, or value is out of range.
        KernelUnavailable: backend ``cpu`` is asked for and not built.
    """
    native = _native(backend)
    n = _require_array("source", source, (_U8,))
    _require_array("target", target, (_U8,), n, writable=True)
    _refuse_overlap({"target": target}, {"source": source})
    if native is None or not 0 <= value < 1 << 32:
        target[:] = source
        return checksum(source, value, backend)
    return int(native.copy_checksum(source, target, value))


def load_word(buffer: Any, offset_bytes: int) -> int:
    """Load one aligned 8-byte word; what its writer wrote before storing it is seen after (acquire).

    Args:
        buffer: any C-contiguous buffer.
        offset_bytes: where the word begins; the address must be a multiple of 8.

    Returns:
        The word, 0 to 2**64 - 1.

    Raises:
        ShapeError: outside the buffer, or not aligned.
        KernelUnavailable: the C++ module is not built (numpy has no atomic loads).
    """
    return int(_require_native("an atomic load").load_word(buffer, offset_bytes))


def store_word(buffer: Any, offset_bytes: int, value: int) -> None:
    """Store one aligned 8-byte word; who sees it sees what this thread wrote before (release).

    Args:
        buffer: any C-contiguous writable buffer.
        offset_bytes: where the word begins; the address must be a multiple of 8.
        value: 0 to 2**64 - 1.

    Raises:
        ShapeError: outside the buffer, not aligned, not writable, or a value that is not a word.
        KernelUnavailable: the C++ module is not built (numpy has no atomic stores).
    """
    native = _require_native("an atomic store")
    if not 0 <= value < 1 << 64:
        raise ShapeError(f"a word must be in 0 .. 2**64 - 1; got {value}; pack the fields into 64 bits")
    native.store_word(buffer, offset_bytes, int(value))


def load_words(buffer: Any, offsets: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Load k aligned 8-byte words one after the other, each with acquire; together they are no snapshot.

    Args:
        buffer: any C-contiguous buffer.
        offsets: [k] int64, in bytes.
        out: [k] uint64, written.

    Raises:
        ShapeError: an offset outside the buffer or not aligned, a wrong length or dtype.
        KernelUnavailable: the C++ module is not built (numpy has no atomic loads).
    """
    native = _require_native("an atomic load")
    count = _require_array("offsets", offsets, (_I64,))
    _require_array("out", out, (_U64,), count, writable=True)
    native.load_words(buffer, offsets, out)


def describe_backends() -> dict[str, str]:
    """What each backend is on this machine, by name: one short phrase, or why it is missing."""
    if _C is None:
        compiled = f"missing: {_MISSING}"
    else:
        crc = "by instruction" if _C.checksum_in_hardware() else "by tables"
        compiled = f"C++, {_C.instruction_set()} loops, CRC32C {crc}"
    return {"cpu": compiled, "reference": f"numpy {np.__version__}"}


def _native(backend: str) -> ModuleType | None:
    """Return the C++ module that ``backend`` stands for, or None for the reference."""
    global _has_warned
    if backend == "reference":
        return None
    if backend == "cpu":
        return _require_native("backend 'cpu'")
    if backend != "auto":
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}; leave it out for auto")
    if _C is None and not _has_warned:
        _has_warned = True
        logger.warning("pyddl._C is missing (%s): kernels run in numpy, many times slower; %s", _MISSING, _REBUILD)
    return _C


_REBUILD = "build it with `pip install .` (or `pip install -e .` in a checkout)"


def _require_native(what: str) -> ModuleType:
    if _C is None:
        raise KernelUnavailable(f"{what} needs the compiled module pyddl._C; it is missing ({_MISSING}); {_REBUILD}")
    return _C


def _require_blocks(codec: str) -> None:
    if codec not in BLOCK_CODECS:
        raise ConfigError(f"a codec of blocks must be one of {', '.join(BLOCK_CODECS)}; got {codec!r}; choose one")


def _encoded(name: str, contribution: NDArray[Any] | Blocks, n: int) -> tuple[str, NDArray[Any]]:
    """A contribution of n values as its codec and its array; ShapeError if it is not one."""
    if isinstance(contribution, Blocks):
        _require_blocks(contribution.codec)
        _require_array(name, contribution.data, (_U8,), encoded_bytes(contribution.codec, n))
        return contribution.codec, contribution.data
    _require_array(name, contribution, (_F32, _U16), n)
    return ("f32" if contribution.dtype == _F32 else "bf16"), contribution


def _require_array(
    name: str,
    array: Any,
    dtypes: tuple[np.dtype[Any], ...],
    length: int | None = None,
    *,
    writable: bool = False,
) -> int:
    """Return the length of a 1-d, aligned, C-contiguous array; ShapeError if it is not as described."""
    if not isinstance(array, np.ndarray) or (
        array.ndim != 1 or array.dtype not in dtypes or (length is not None and len(array) != length)
    ):
        wanted = f"[{'n' if length is None else length}] {' or '.join(d.name for d in dtypes)}"
        got = f"{list(array.shape)} {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"{name} must be {wanted}; got {got}; pass a numpy array of that length and dtype")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise ShapeError(f"{name} must be contiguous and aligned; got a strided or misaligned view; copy it first")
    if writable and not flags.writeable:
        raise ShapeError(f"{name} is written to and must be writable; got a read-only array; pass one of your own")
    return len(array)


def _refuse_overlap(outputs: dict[str, NDArray[Any]], inputs: dict[str, NDArray[Any]]) -> None:
    """Raise ShapeError if an output's memory meets that of an input or of another output."""
    spans = [(*_span(array), name) for name, array in outputs.items()]
    others = [(*_span(array), name) for name, array in inputs.items()]
    for i, (begin, end, name) in enumerate(spans):
        for other_begin, other_end, other in others + spans[i + 1 :]:
            if begin < other_end and other_begin < end and begin < end and other_begin < other_end:
                raise ShapeError(
                    f"{name} must not overlap {other} (kernels work out of place); got shared memory; "
                    "pass a buffer of its own"
                )


def _span(array: NDArray[Any]) -> tuple[int, int]:
    """Return the first address of a contiguous array and the one past its last."""
    begin: int = array.__array_interface__["data"][0]  # a third of the time of array.ctypes.data
    return begin, begin + array.nbytes


def _presence(array: object) -> str:
    return "None" if array is None else "given"


def _shorten(values: NDArray[Any]) -> str:
    return str(values.tolist()) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"
