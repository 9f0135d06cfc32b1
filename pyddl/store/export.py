"""A run's model as a safetensors file, which other programs can load.

Here: from a checkpoint's fragments back to tensors in their own shapes and dtypes.
Not here: reading checkpoints (checkpoint.py), optimizer states, which nobody else can use.

The format (eight bytes with the header's length, the header in JSON, the tensors' bytes) is written here and
not by the safetensors package: that wants all tensors in memory at once, and its functions for raw bytes,
which bfloat16 needs where there is no torch, differ between its versions.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.kernels import encode_bf16
from ..core.layout import Segment, TensorSpec
from ..errors import CheckpointError, ConfigError
from .checkpoint import Checkpoint, newest_good_checkpoint, read_checkpoint
from .files import replacing

__all__ = ["export_safetensors"]

logger = logging.getLogger(__name__)

# dtype of a TensorSpec -> name in safetensors, type of the stored words
_STORED: dict[str, tuple[str, type[np.generic]]] = {
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", np.uint16),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int16": ("I16", np.int16),
    "int8": ("I8", np.int8),
    "uint64": ("U64", np.uint64),
    "uint32": ("U32", np.uint32),
    "uint16": ("U16", np.uint16),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.bool_),
}
_WIDENED = _STORED["float32"]  # for what is not in the table: float8 in its variants


def export_safetensors(run_or_checkpoint: str | Path, out: str | Path) -> Path:
    """Write a run's global model (parameters, buffers and counters) as a safetensors file.

    Each tensor stands once, under its first name, in its own dtype and shape; parameters, which a checkpoint
    holds as float32, are rounded to nearest. The file's metadata holds step and fingerprint and, as JSON:
    ``pyddl.aliases`` (other name -> name in the file, for tied weights), ``pyddl.frozen`` (names of tensors
    that were not trained, which a checkpoint does not hold and this file lacks), and ``pyddl.widened`` (names
    of float8 tensors, which are written as float32).

    Args:
        run_or_checkpoint: a run's folder, whose newest good checkpoint is taken, or one checkpoint.
        out: the file; written whole or not at all; replaced if it exists.

    Returns:
        ``out``.

    Raises:
        ConfigError: if a path is wrong.
        CheckpointError: if there is no good checkpoint, or the file cannot be written.
    """
    source, out = Path(run_or_checkpoint), Path(out)
    if not source.exists():
        raise ConfigError(
            f"an export needs a run's folder or a checkpoint; {source} does not exist; name one of the two"
        )
    if out.is_dir() or not out.parent.is_dir():
        problem = "that is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError(f"an export needs a file name to write to; got {out}: {problem}; name another")
    if source.is_dir():
        checkpoint, path, bad = newest_good_checkpoint(source)
        for sentence in bad:
            logger.warning("passed over: %s", sentence)
    else:
        checkpoint, path = read_checkpoint(source), source
    if out.exists() and out.samefile(path):
        raise ConfigError(f"an export may not replace its own checkpoint; got {out} for both; name another file")
    try:
        _write(checkpoint, out)
    except OSError as error:
        raise CheckpointError(
            f"{out} must be written in whole; {error.strerror or error}; make room, or choose another place"
        ) from error
    return out


def _write(checkpoint: Checkpoint, out: Path) -> None:
    tensors = checkpoint.layout.tensors
    included = [i for i, spec in enumerate(tensors) if spec.role != "frozen"]
    # Wide words first: then all are aligned without gaps, which the format forbids.
    included.sort(key=lambda i: (-np.dtype(_stored(tensors[i])[1]).itemsize, i))
    header: dict[str, Any] = {"__metadata__": _metadata(checkpoint)}
    position = 0
    for i in included:
        name, dtype = _stored(tensors[i])
        end = position + tensors[i].num_elements * np.dtype(dtype).itemsize
        header[tensors[i].name] = {
            "dtype": name,
            "shape": list(tensors[i].shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    pieces = _pieces_by_tensor(checkpoint)
    with replacing(out) as temporary, temporary.open("r+b") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for i in included:
            file.write(_assemble(checkpoint, i, pieces[i]).view(np.uint8).data)


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    tensors = checkpoint.layout.tensors
    aliases = {alias: spec.name for spec in tensors for alias in spec.aliases if spec.role != "frozen"}
    frozen = [name for spec in tensors if spec.role == "frozen" for name in (spec.name, *spec.aliases)]
    widened = [spec.name for spec in tensors if spec.role != "frozen" and spec.dtype not in _STORED]
    if frozen:
        logger.warning("%d frozen tensors are not in a checkpoint, nor in its export", len(frozen))
    return {
        "format": "pt",  # what the transformers library wants to read before it loads a file
        "pyddl.step": str(checkpoint.step),
        "pyddl.fingerprint": checkpoint.layout.fingerprint,
        "pyddl.aliases": json.dumps(aliases),
        "pyddl.frozen": json.dumps(frozen),
        "pyddl.widened": json.dumps(widened),
    }


def _stored(spec: TensorSpec) -> tuple[str, type[np.generic]]:
    return _STORED.get(spec.dtype, _WIDENED)


def _pieces_by_tensor(checkpoint: Checkpoint) -> dict[int, list[tuple[int, Segment]]]:
    """For each tensor the (fragment, segment) that hold it; for a counter the place among the fragment's."""
    pieces: dict[int, list[tuple[int, Segment]]] = defaultdict(list)
    for fragment in checkpoint.layout.fragments:
        for segment in fragment.segments:
            pieces[segment.tensor].append((fragment.index, segment))
        offset = 0
        for tensor, count in fragment.counters:
            pieces[tensor].append((fragment.index, Segment(tensor, 0, count, offset)))
            offset += count
    return pieces


def _assemble(checkpoint: Checkpoint, tensor: int, pieces: list[tuple[int, Segment]]) -> NDArray[Any]:
    """One tensor, flat, in the words in which it is stored."""
    spec = checkpoint.layout.tensors[tensor]
    words = np.zeros(spec.num_elements, _stored(spec)[1])
    for index, segment in pieces:
        state = checkpoint.fragments[index]
        source: NDArray[Any] = state.counters if spec.role == "counter" else state.theta
        values = source[segment.offset : segment.offset + segment.num_elements]
        target = words[segment.start : segment.stop]
        if spec.dtype == "bfloat16":
            encode_bf16(values, None, target)
        else:
            with np.errstate(over="ignore"):  # beyond float16 lies its infinity, as for any cast
                target[:] = values.astype(words.dtype)
    return words.astype(words.dtype.newbyteorder("<"), copy=False)
