"""What both sides of the set-up share: opening the world, the words of hello and welcome.

Here: the configuration as it travels, refusals as exceptions again, the comparisons of frozen tensors. Not here: the
two sides themselves (session.py: a learner's; serving.py: the syncer's).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..config import Config, TimeoutConfig
from ..errors import CheckpointError, ConfigError, LayoutMismatch, PyddlError, TransportError

if TYPE_CHECKING:
    from ..link.world import World

__all__ = [
    "LEAVE_S",
    "SECTIONS",
    "SETUP_REMEDY",
    "frozen_change",
    "frozen_difference",
    "open_world",
    "refusal",
    "sections_of",
]

SETUP_REMEDY = "the limit of the set-up is timeouts.setup_s"
LEAVE_S = 60.0  # to free windows together; nobody has anything else to do then
SECTIONS = ("run", "sync", "outer", "timeouts")


def open_world(ranks: int | None, num_learners: int, timeouts: TimeoutConfig, *, only_serves: bool = False) -> World:
    """Come into MPI with everybody else, under the alarm of the set-up; see link.world.World."""
    from ..link.alarm import deadline, interruptible
    from ..link.world import Wish, World

    limit = deadline(timeouts.setup_s, "all ranks must come into MPI", "another has not come", SETUP_REMEDY)
    with limit, interruptible():
        return World(Wish(ranks, num_learners, only_serves), group_timeout_s=timeouts.group_s)


def sections_of(config: Config) -> dict[str, Any]:
    """A configuration as it travels: JSON-able, by section."""
    return {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}


def frozen_difference(checksums: list[dict[str, int]], whose: str) -> str:
    """In which frozen tensors some differ from the first, as a sentence; empty if in none.

    Nothing of a frozen tensor is ever sent, so with others the same Theta would be another model.

    Args:
        checksums: by name, of each learner or of each rank; the layouts, and so the names, are equal.
        whose: what each one belongs to, such as "learner".
    """
    first = checksums[0]
    names = [name for name in first if any(other[name] != first[name] for other in checksums)]
    if not names:
        return ""
    few = _few(names)
    those = ", ".join(str(i) for i, other in enumerate(checksums) if other != first)
    return (
        f"frozen tensors must be equal everywhere, since they are never sent; {few} of {whose} {those} differ from "
        f"those of {whose} 0: load the same values everywhere (or set the same seed before the model is made)"
    )


def frozen_change(then: dict[str, int], now: dict[str, int], run: str) -> str:
    """In which frozen tensors the model is not that of a run that is resumed, as a sentence; empty if in none.

    Args:
        then: checksums by name that the run's checkpoint holds.
        now: those of the model; the layouts, and so the names, are equal.
        run: the checkpoint, for the sentence.
    """
    names = [name for name, value in now.items() if then.get(name) != value]
    if not names:
        return ""
    return (
        f"frozen tensors must be those that the run was trained with, since no checkpoint holds them; {_few(names)} "
        f"differ from those of {run}: load the values that the run began with (or set the same seed before the model "
        "is made)"
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refusal(answer: dict[str, Any]) -> PyddlError:
    """The exception that another process has met, from its ``kind`` and ``error``."""
    kinds = {c.__name__: c for c in (ConfigError, LayoutMismatch, CheckpointError, TransportError)}
    error: PyddlError = kinds.get(answer["kind"], PyddlError)(answer["error"])
    error.is_told = True  # by the syncer
    return error
