"""Every exception that pyddl raises on purpose.

    PyddlError
    +-- ConfigError (ValueError)      a setting, an option or a file the user gave
    +-- ShapeError (ValueError)       an array of the wrong length, dtype or overlap
    +-- LayoutMismatch                two models that should be the same are not
    +-- ProtocolError                 an event that the protocol's rules forbid
    +-- TransportError                MPI, the windows, a process that did not answer in time
    +-- CheckpointError               a file that is missing, damaged or of another run
    +-- KernelUnavailable             a backend that was asked for by name and is not built

A message has three parts: what was required, what came, what to do. The command line prints the message alone and
ends with the exception's ``exit_status``.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "KernelUnavailable",
    "LayoutMismatch",
    "ProtocolError",
    "PyddlError",
    "ShapeError",
    "TransportError",
]


class PyddlError(Exception):
    """Base of all of them; ``exit_status`` is what a command that ends by it returns.

    ``is_told``: another process has shown it to the user already.
    """

    exit_status = 1
    is_told = False


class ConfigError(PyddlError, ValueError):
    """A setting is unknown, out of range or contradicts another."""

    exit_status = 2


class ShapeError(PyddlError, ValueError):
    """An array has the wrong length, dtype, device or overlaps another."""

    exit_status = 2


class LayoutMismatch(PyddlError):
    """A learner's parameters differ from those of the run: names, order, shapes, dtypes or fragments."""

    exit_status = 2


class ProtocolError(PyddlError):
    """The protocol was driven in a way that its rules forbid."""


class TransportError(PyddlError):
    """A message could not be moved, or a process did not answer within its deadline."""


class CheckpointError(PyddlError):
    """A checkpoint is missing, damaged or belongs to another run."""

    exit_status = 2


class KernelUnavailable(PyddlError):
    """A kernel backend was asked for by name and this build does not have it."""

    exit_status = 2
