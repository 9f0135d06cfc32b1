"""The kernels in plain numpy: what core/kernels.py's compiled ones are tested against, and its fallback.

Here: one function per kernel, written to be read. Not here: checks of arguments and the choice of a backend
(core/kernels.py), atomic words (numpy has none).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_BYTES",
    "checksum",
    "decode_bf16",
    "decode_blocks",
    "encode_bf16",
    "encode_bf16_with_residual",
    "encode_blocks",
    "merge_outer_step",
]

BLOCK = 256
"""Values that share a scale in the codecs int8 and int4; csrc/element.h describes them."""
BLOCK_BYTES = {"int8": 4 + BLOCK, "int4": 4 + BLOCK // 2}

_INT4_VALUES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64], np.int8)
_SMALLEST_NORMAL = np.float32(2.0**-126)
_RULE_RDA, _RULE_BUFFER = 1, 2
_SHORTEST_DIRECTION = 1e-6
_POLYNOMIAL = 0x82F63B78
_CHECKSUM_LANES = 1024

Merged = tuple[list[bool], list[float], float, int, bool]


def decode_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bf16 bits to float32, exactly."""
    widened: NDArray[np.float32] = np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return widened


def encode_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bf16 bits, to nearest with ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16  # may wrap, for NaN only
    quiet = (bits >> 16) | np.uint32(0x40)
    bf16: NDArray[np.uint32] = np.where(np.isnan(values), quiet, rounded)
    return bf16.astype(np.uint16)


def encode_bf16_with_residual(values: NDArray[np.float32], residual: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round values + residual to bf16 bits; leave in ``residual`` what the rounding lost (error feedback)."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = values + residual
        bits = encode_bf16(total)
        decoded = decode_bf16(bits)
        residual[:] = np.where(np.isfinite(decoded), total - decoded, np.float32(0))
    return bits


def encode_blocks(
    codec: str, values: NDArray[np.float32], residual: NDArray[np.float32] | None, out: NDArray[np.uint8]
) -> None:
    """Encode values + residual as int8 or int4 and leave in ``residual`` what that lost."""
    n = len(values)
    blocks = out.reshape(-1, BLOCK_BYTES[codec])
    x = np.zeros((len(blocks), BLOCK), np.float32)
    x.reshape(-1)[:n] = values
    with np.errstate(all="ignore"):
        if residual is not None:
            x.reshape(-1)[:n] += residual
        largest = np.abs(x).max(axis=1, initial=0.0)
        finite = np.isfinite(x).min(axis=1, initial=True)
        scale = (largest / np.float32(127 if codec == "int8" else 64)).astype(np.float32)
        scale[scale < _SMALLEST_NORMAL] = 0
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        scale[~finite], inverse[~finite] = np.nan, 0
        scaled = np.where(finite[:, None], x, np.float32(0)) * inverse[:, None]
        if codec == "int8":
            codes = np.rint(scaled).astype(np.int8)
            blocks[:, 4:] = codes.view(np.uint8)
        else:
            magnitude = np.abs(scaled)
            power = ((magnitude.view(np.uint32) + np.uint32(0x00400000)) >> 23).astype(np.int32) - 126
            exponent = np.clip(np.maximum(power, magnitude >= 0.5), 0, 7)
            nibbles = (exponent | np.signbit(x) << 3).astype(np.uint8)
            blocks[:, 4:] = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
            codes = _INT4_VALUES[nibbles]
        blocks[:, :4] = scale.view(np.uint8).reshape(-1, 4)
        if residual is not None:
            lost = x.astype(np.float64) - scale[:, None].astype(np.float64) * codes
            residual[:] = np.where(finite[:, None], lost, 0).astype(np.float32).reshape(-1)[:n]


def decode_blocks(codec: str, blocks: NDArray[np.uint8], n: int) -> NDArray[np.float64]:
    """The n values of blocks of int8 or int4, exactly."""
    rows = blocks.reshape(-1, BLOCK_BYTES[codec])
    scale = np.ascontiguousarray(rows[:, :4]).view(np.float32).astype(np.float64)
    if codec == "int8":
        codes = np.ascontiguousarray(rows[:, 4:]).view(np.int8)
    else:
        codes = _INT4_VALUES[np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)]
    values: NDArray[np.float64] = (scale * codes).reshape(-1)[:n]
    return values


def merge_outer_step(
    contributions: Sequence[tuple[str, NDArray[Any]]],
    weights: NDArray[np.float64],
    segments: NDArray[np.int64],
    rules: NDArray[np.uint8],
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32] | None,
    *,
    nesterov: bool,
    lr: float,
    mu: float,
    theta_out: NDArray[np.float32],
    momentum_out: NDArray[np.float32] | None,
    wire_out: NDArray[Any] | None,
) -> Merged:
    """Merge and outer step (paper, sec. 3.2, App. D); arguments as in :func:`.kernels.merge_outer_step`.

    A contribution comes as its codec and its array.

    Returns:
        finite per contributor, norm per contributor, norm of the merged outer gradient, number of tensors
        whose directions cancelled, whether theta_out is finite.
    """
    num = len(contributions)
    vectors = [_decode(codec, array, len(theta)) for codec, array in contributions]
    squares = np.zeros(num)
    merged_square = 0.0
    cancelled = 0
    share = weights / weights.max()  # first by the largest: a sum of finite weights may not be finite
    share = share / share.sum()
    with np.errstate(over="ignore", invalid="ignore"):
        for begin, end, rule in zip(segments[:-1], segments[1:], rules, strict=True):
            part = slice(int(begin), int(end))
            rows = np.empty((num, int(end - begin)))
            for i, vector in enumerate(vectors):
                rows[i] = vector[part]
            square = np.einsum("ik,ik->i", rows, rows)
            squares += square
            coefficients = share
            if rule == _RULE_RDA and num > 1 and np.isfinite(square).all():
                norms = np.sqrt(square)
                direction = np.divide(share, norms, out=np.zeros(num), where=norms > 0)
                mean_norm = float(share @ norms)
                length = float(np.linalg.norm(direction @ rows))
                if length >= _SHORTEST_DIRECTION:
                    coefficients = direction * (mean_norm / length)
                elif mean_norm > 0:
                    cancelled += 1
            merged = coefficients @ rows
            merged_square += float(merged @ merged)
            if rule == _RULE_BUFFER:
                theta_out[part] = theta[part] - merged
                if momentum is not None and momentum_out is not None:
                    momentum_out[part] = momentum[part]
            elif nesterov and momentum is not None and momentum_out is not None:
                buffer = mu * momentum[part].astype(np.float64) + merged
                momentum_out[part] = buffer
                theta_out[part] = theta[part] - lr * (merged + mu * buffer)
            else:
                theta_out[part] = theta[part] - lr * merged
                if momentum is not None and momentum_out is not None:
                    momentum_out[part] = momentum[part]
        if wire_out is not None:
            wire_out[:] = encode_bf16(theta_out) if wire_out.dtype == np.uint16 else theta_out
    finite = [bool(f) for f in np.isfinite(squares)]
    norm = float(np.sqrt(merged_square))
    return finite, [float(s) for s in np.sqrt(squares)], norm, cancelled, bool(np.isfinite(theta_out).all())


def _decode(codec: str, array: NDArray[Any], n: int) -> NDArray[Any]:
    if codec in BLOCK_BYTES:
        return decode_blocks(codec, array, n)
    return decode_bf16(array) if codec == "bf16" else array


def checksum(buffer: memoryview, value: int) -> int:
    """CRC32C of the bytes of ``buffer``, following those that ``value`` is the checksum of.

    A long buffer is cut into equal lanes that advance side by side; a lane's register is then moved past the
    bytes of the next lane, which is a multiplication by a constant.
    """
    data = np.frombuffer(buffer, np.uint8)
    table = _byte_table()
    crc = value ^ 0xFFFFFFFF
    length = len(data) // _CHECKSUM_LANES
    head = length * _CHECKSUM_LANES if length >= 16 else 0
    if head:
        lanes = data[:head].reshape(_CHECKSUM_LANES, length)
        registers = np.zeros(_CHECKSUM_LANES, np.uint32)
        for column in range(length):
            registers = table[(registers ^ lanes[:, column]) & 0xFF] ^ (registers >> 8)
        shift = _shift_tables(length)
        for register in registers.tolist():
            crc = shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^ shift[3][crc >> 24]
            crc ^= register
    words = table.tolist()
    for byte in data[head:].tolist():
        crc = words[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.lru_cache(maxsize=1)
def _byte_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@functools.lru_cache(maxsize=8)
def _shift_tables(num_bytes: int) -> list[list[int]]:
    factor, square = 0x80000000, 0x00800000  # 1 and x^8, reflected
    while num_bytes:
        if num_bytes & 1:
            factor = _multiply(factor, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return [[_multiply(factor, byte << 8 * part) for byte in range(256)] for part in range(4)]


def _multiply(a: int, b: int) -> int:
    """Product of two reflected polynomials modulo Castagnoli's."""
    product = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
