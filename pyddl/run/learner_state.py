"""A learner's own state as a file: inner optimizer, data cursors, random numbers.

Here: torch state to arrays and back; ``learner-<id>.h5`` for rank 0, ``learner-<id>-rank<g>.h5`` for the cursors of
the other ranks. Not here: the file format (store/checkpoint.py), Theta, which is the syncer's.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..store.checkpoint import read_learner_state, write_learner_state

if TYPE_CHECKING:
    from .learner import Learner

__all__ = ["load_learner", "save_learner"]

log = logging.getLogger(__name__)


def _path(folder: Path, learner: Learner) -> Path:
    rank = f"-rank{learner.rank}" if learner.rank else ""
    return folder / f"learner-{learner.learner_id}{rank}.h5"


def save_learner(folder: Path | None, learner: Learner) -> None:
    """Write the learner's state; a failure is a warning, since the run's state is the syncer's."""
    if folder is None:
        return
    arrays: dict[str, NDArray[Any]] = {"rng/torch": torch.get_rng_state().numpy()}
    meta: dict[str, Any] = {
        "num_steps": learner.num_steps,
        "step": learner.step_count,
        "tokens": learner.tokens,
        "cursors": [shard.state_dict() for shard in learner.shards],
    }
    try:
        if learner.rank == 0:  # the optimizer's state is equal on all ranks
            meta["optimizer"] = _flatten(learner.optimizer.state_dict(), "optimizer", arrays)
        write_learner_state(_path(folder, learner), arrays, meta)
    except (CheckpointError, TypeError, ValueError) as error:  # the latter: a state that is no tensors and numbers
        log.warning("%s; the learner's optimizer state is not saved", error)


def load_learner(folder: Path, learner: Learner) -> None:
    """Take up the state of an earlier run of this learner, as far as there is one; what is missing starts fresh."""
    own = _path(folder, learner)
    shared = folder / f"learner-{learner.learner_id}.h5"
    try:
        arrays, meta = read_learner_state(shared)
        learner.optimizer.load_state_dict(_restore(meta["optimizer"], arrays))
        if own != shared:
            arrays, meta = read_learner_state(own)
    except (CheckpointError, KeyError, ValueError) as error:  # the latter two: the state of another optimizer
        log.warning("%s; learner %d starts with a fresh inner optimizer", error, learner.learner_id)
        return
    torch.set_rng_state(torch.from_numpy(arrays["rng/torch"]))
    learner.resume_cursors(meta["cursors"])


def _flatten(value: Any, name: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """A JSON-able copy in which every tensor is replaced by a reference to an array."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        bits = plain.view(torch.int16).numpy().view(np.uint16) if plain.dtype == torch.bfloat16 else plain.numpy()
        arrays[name] = bits
        return {
            "__tensor__": name,
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
        }
    if isinstance(value, dict):
        items = [[k, _flatten(v, f"{name}/{k}", arrays)] for k, v in value.items()]
        return {"__dict__": items}
    if isinstance(value, (list, tuple)):
        kind = "__tuple__" if isinstance(value, tuple) else "__list__"
        return {kind: [_flatten(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]}
    json.dumps(value)  # numbers, strings, None
    return value


def _restore(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        array = np.ascontiguousarray(arrays[value["__tensor__"]])
        tensor = torch.from_numpy(array.copy())
        if value["dtype"] == "bfloat16":
            tensor = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return tensor.reshape(value["shape"])
    if "__dict__" in value:
        return {k: _restore(v, arrays) for k, v in value["__dict__"]}
    if "__tuple__" in value:
        return tuple(_restore(v, arrays) for v in value["__tuple__"])
    return [_restore(v, arrays) for v in value["__list__"]]
