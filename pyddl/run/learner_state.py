"""A learner's own state as a file: inner optimizer, data cursors, random numbers.

Here: torch state to arrays and back; ``learner-<id>.h5`` for rank 0, ``learner-<id>-rank<g>.h5`` for the cursors of
the other ranks. Not here: the file format (store/checkpoint.py), Theta, which is the syncer's.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import TimeoutConfig
from ..errors import CheckpointError
from ..store.checkpoint import read_learner_state, write_learner_state

if TYPE_CHECKING:
    from .learner import Learner

__all__ = ["load_learner", "save_learner"]

log = logging.getLogger(__name__)

_writers: dict[Path, threading.Thread] = {}  # the file that is being written beside training -> by whom
_FEW_STEPS = 8  # a learner saves at its next boundary, by when the clock of the others has moved on
_NEEDS_BUFFERS = ("amsgrad", "centered", "momentum")  # settings under which an optimizer keeps a buffer more


def _path(folder: Path, learner: Learner) -> Path:
    rank = f"-rank{learner.rank}" if learner.rank else ""
    return folder / f"learner-{learner.learner_id}{rank}.h5"


def save_learner(
    folder: Path | None, learner: Learner, *, limit_s: float = TimeoutConfig.save_s, beside: bool = False
) -> None:
    """Write the learner's state; a failure is a warning, since the run's state is the syncer's.

    Args:
        folder: of the run; None: nothing is written.
        learner: at a step boundary.
        limit_s: the file system may take so long, seconds; later the state counts as not saved. Not with ``beside``.
        beside: take a copy and write it in a thread, beside training; left out while the last one is being written.
    """
    if folder is None:
        return
    path = _path(folder, learner)
    deadline_s = time.monotonic() + limit_s
    writer = _writers.get(path)
    if writer is not None and writer.is_alive():
        if beside:
            return
        writer.join(limit_s)  # the newer state must be the last
        if writer.is_alive():
            _warn_overdue(path, limit_s)
            return
    arrays: dict[str, NDArray[Any]] = {"rng/torch": torch.get_rng_state().numpy()}
    meta: dict[str, Any] = {
        "num_steps": learner.num_steps,
        "step": learner.step_count,
        "tokens": learner.tokens,
        "cursors": [shard.state_dict() for shard in learner.shards],
    }
    if learner.rank == 0:  # the optimizer's state is equal on all ranks
        moments: dict[str, NDArray[Any]] = {}
        try:
            meta["optimizer"] = _flatten(learner.optimizer.state_dict(), "optimizer", moments)
            meta["optimizer_kind"], meta["optimizer_shapes"] = _describe(learner.optimizer)
            arrays |= moments
        except (AttributeError, TypeError, ValueError) as error:  # a state that is no tensors and numbers, or none
            meta.pop("optimizer", None)
            log.warning("%s; the learner's optimizer state is not saved", error)
    if beside:
        arrays = {name: array.copy() for name, array in arrays.items()}  # the next step changes the originals
    writer = threading.Thread(target=_write, args=(path, arrays, meta), name="pyddl-save", daemon=True)
    _writers[path] = writer
    writer.start()
    if not beside:
        writer.join(max(0.0, deadline_s - time.monotonic()))
        if writer.is_alive():
            _warn_overdue(path, limit_s)


def _warn_overdue(path: Path, limit_s: float) -> None:
    log.warning(
        "the learner's state must reach the disk within %.0f s (timeouts.save_s); %s has not: take it for not saved, "
        "the file system may hang",
        limit_s,
        path,
    )


def _write(path: Path, arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> None:
    try:
        write_learner_state(path, arrays, meta)
    except CheckpointError as error:
        log.warning("%s; the learner's optimizer state is not saved", error)


def load_learner(folder: Path, learner: Learner) -> None:
    """Take up the state of an earlier run of this learner, as far as there is one; what is missing starts fresh.

    Call it before the first step: ``learner.step_count`` must be the clock at which the run goes on.
    """
    own = _path(folder, learner)
    shared = folder / f"learner-{learner.learner_id}.h5"  # rank 0's: the optimizer of all ranks
    arrays: dict[str, NDArray[Any]] = {}
    meta: dict[str, Any] = {}
    if not shared.exists():
        log.warning(
            "learner %d starts with a fresh inner optimizer: %s does not exist, since the learner is new, was lost, or "
            "ended without close()",
            learner.learner_id,
            shared,
        )
    else:
        try:
            arrays, meta = read_learner_state(shared)
            _load_optimizer(learner.optimizer, meta, arrays)
        except (CheckpointError, KeyError, ValueError) as error:  # the latter two: the state of another optimizer
            log.warning("%s; learner %d starts with a fresh inner optimizer", error, learner.learner_id)
    try:
        if own != shared:
            arrays, meta = read_learner_state(own)
    except CheckpointError as error:
        log.warning("%s; rank %d of learner %d begins its data anew", error, learner.rank, learner.learner_id)
        return
    if not meta:
        return
    age_steps = learner.step_count - meta["step"]
    if age_steps > _FEW_STEPS:
        log.warning(
            "the state of learner %d in %s should be of the step at which the run goes on, %d; it is of step %d: %s "
            "are %d steps old, and training goes on with them",
            learner.learner_id,
            own.name,
            learner.step_count,
            meta["step"],
            "this rank's place in the data and its random numbers"
            if learner.rank
            else "the optimizer's moments, the place in the data and the random numbers",
            age_steps,
        )
    torch.set_rng_state(torch.from_numpy(arrays["rng/torch"]))
    learner.resume_cursors(meta["cursors"])


def _describe(optimizer: torch.optim.Optimizer) -> tuple[str, list[list[list[int]]]]:
    """What a saved state must fit: the kind of optimizer, the shape of each parameter of each group."""
    shapes = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    return type(optimizer).__name__, shapes


def _load_optimizer(optimizer: torch.optim.Optimizer, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Load the moments and counters; the groups' settings stay as this run was told.

    Raises:
        ValueError: if the state is that of another optimizer, or lacks what the settings of now need.
    """
    if "optimizer_kind" not in meta:
        raise ValueError("the saved state should hold the optimizer's and does not: it could not be written")
    kind, shapes = _describe(optimizer)
    saved_kind, saved_shapes = meta["optimizer_kind"], meta["optimizer_shapes"]
    if (kind, shapes) != (saved_kind, saved_shapes):
        raise ValueError(
            f"an optimizer's state must be that of the same optimizer over the same parameters; this one is a {kind} "
            f"with groups of {_counts(shapes)} parameters, the saved one a {saved_kind} with {_counts(saved_shapes)}"
            + ("" if _counts(shapes) != _counts(saved_shapes) or kind != saved_kind else " of other shapes")
        )
    saved = _restore(meta["optimizer"], arrays)
    groups = optimizer.state_dict()["param_groups"]
    for new, old in zip(groups, saved["param_groups"], strict=True):
        for name in _NEEDS_BUFFERS:
            if new.get(name) and not old.get(name):
                raise ValueError(f"an optimizer with {name}={new[name]} needs the state of one; it was {old.get(name)}")
        new["params"] = old["params"]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def _counts(shapes: list[list[list[int]]]) -> str:
    return " + ".join(str(len(group)) for group in shapes)


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
