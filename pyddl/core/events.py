"""What goes into the protocol and what comes out of it.

Here: the events and actions of protocol.py, as frozen dataclasses that hold plain numbers, and their dict form.
Not here: any rule. Standard library only, so that a trace can be read and replayed anywhere.

Every event about a learner names its incarnation; an action says why it was taken.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Action",
    "Announced",
    "Checkpoint",
    "CloseRound",
    "ContributionArrived",
    "ContributionDamaged",
    "Contributor",
    "Event",
    "Finish",
    "LearnerDone",
    "LearnerJoined",
    "LearnerLost",
    "LearnerSilent",
    "Merge",
    "MergeDone",
    "OpenRound",
    "Progress",
    "Publish",
    "Reject",
    "StopAt",
    "StopRequested",
    "Tick",
    "event_from_dict",
    "to_dict",
]


@dataclass(frozen=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True)
class LearnerJoined(Event):
    """A learner has attached; it starts at the syncer's step."""

    learner_id: int
    incarnation: int


@dataclass(frozen=True)
class Progress(Event):
    """A learner's board: its step t_m, the inner steps it has really made, the tokens it has processed."""

    learner_id: int
    incarnation: int
    step: int
    num_steps: int
    tokens: int


@dataclass(frozen=True)
class Announced(Event):
    """A learner has taken its snapshot for a round (or has nothing to give: ``declined``)."""

    learner_id: int
    incarnation: int
    round: int
    declined: bool = False


@dataclass(frozen=True)
class ContributionArrived(Event):
    """The payload of an announced contribution is complete and its checksum is right.

    ``step`` is the learner's t_m at the snapshot; ``c_steps`` and ``c_tokens`` are the inner steps and tokens since it
    received ``base_version`` of the fragment (paper, learner).
    """

    learner_id: int
    incarnation: int
    round: int
    fragment: int
    base_version: int
    step: int
    c_steps: int
    c_tokens: int


@dataclass(frozen=True)
class ContributionDamaged(Event):
    """The payload of an announced contribution is complete but unusable, for the given reason."""

    learner_id: int
    incarnation: int
    round: int
    reason: str


@dataclass(frozen=True)
class LearnerSilent(Event):
    """A learner has not moved for the heartbeat timeout; undone by its next Progress."""

    learner_id: int
    incarnation: int


@dataclass(frozen=True)
class LearnerLost(Event):
    """The end of a learner's process was seen; final for this incarnation."""

    learner_id: int
    incarnation: int
    reason: str = "its process ended"


@dataclass(frozen=True)
class LearnerDone(Event):
    """A learner trains no more; it still answers the drain from within ``close()``."""

    learner_id: int
    incarnation: int


@dataclass(frozen=True)
class MergeDone(Event):
    """The merge of a round has ended; ``rejected`` are (learner_id, reason) that it had to leave out."""

    round: int
    rejected: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class StopRequested(Event):
    """A signal or a time limit wants the run to end in good order."""

    reason: str


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class Action:
    """Something the driver has to do."""


@dataclass(frozen=True)
class OpenRound(Action):
    """Ask every learner for a fragment of which it holds ``base_version``."""

    round: int
    fragment: int
    base_version: int
    drain: bool
    reason: str


@dataclass(frozen=True)
class CloseRound(Action):
    """Ask no longer; who has announced is still waited for."""

    round: int
    fragment: int
    reason: str


@dataclass(frozen=True)
class Contributor:
    """One input of a merge; ``weight`` is c_tokens * (c_tokens / c_steps) (paper, syncer)."""

    learner_id: int
    incarnation: int
    weight: float
    base_version: int
    step: int
    c_steps: int
    c_tokens: int


@dataclass(frozen=True)
class Merge(Action):
    """Merge the contributions, sorted by learner_id, and take the outer step from base_version to version."""

    round: int
    fragment: int
    base_version: int
    version: int
    contributors: tuple[Contributor, ...]
    reason: str


@dataclass(frozen=True)
class Publish(Action):
    """Send the new version to ALL learners.

    ``merged`` are the learners whose contribution it contains; one whose contribution came from an earlier
    incarnation is not among them (it is among the Merge's contributors).
    """

    round: int
    fragment: int
    version: int
    merged: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True)
class Reject(Action):
    """Tell a learner that its contribution was not merged; ``cause`` is what is counted."""

    learner_id: int
    incarnation: int
    round: int
    cause: str
    reason: str


@dataclass(frozen=True)
class StopAt(Action):
    """Learners end at this clock step."""

    step: int
    reason: str


@dataclass(frozen=True)
class Checkpoint(Action):
    """Write the global state beside the work."""

    step: int
    reason: str


@dataclass(frozen=True)
class Finish(Action):
    """The run is over."""

    reason: str


def to_dict(item: Event | Action) -> dict[str, Any]:
    """The dict form: the class name under ``kind``, then the fields."""
    return {"kind": type(item).__name__, **dataclasses.asdict(item)}


def event_from_dict(fields: dict[str, Any]) -> Event:
    """Rebuild an event from :func:`to_dict`'s form.

    Raises:
        ValueError: if ``kind`` is not the name of an event.
    """
    fields = dict(fields)
    kind = fields.pop("kind", None)
    for cls in Event.__subclasses__():
        if cls.__name__ == kind:
            if cls is MergeDone:
                fields["rejected"] = tuple((int(m), str(r)) for m, r in fields.get("rejected", ()))
            return cls(**fields)
    raise ValueError(f"kind must name an event of pyddl.core.events; got {kind!r}")
