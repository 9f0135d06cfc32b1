"""pyddl: Decoupled DiLoCo for HPC (arXiv:2604.21428). Learners never wait; a syncer merges what has arrived.

    session = pyddl.init(config)
    learner = session.attach(model, optimizer)
    for batch in learner.shard(loader):
        ...
        learner.step(tokens=n)
    learner.close()

Importing this package imports neither MPI nor torch: it works on a login node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    ConfigError,
    KernelUnavailable,
    LayoutMismatch,
    ProtocolError,
    PyddlError,
    ShapeError,
    TransportError,
)

if TYPE_CHECKING:
    from .config import Config as Config
    from .config import load_config as load_config
    from .run.session import Session as Session
    from .run.session import init as init

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "KernelUnavailable",
    "LayoutMismatch",
    "ProtocolError",
    "PyddlError",
    "Session",
    "ShapeError",
    "TransportError",
    "__version__",
    "init",
    "load_config",
]


_LAZY = {"Config": "config", "load_config": "config", "Session": "run.session", "init": "run.session"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pyddl' has no attribute {name!r}")
    from importlib import import_module  # MPI is imported only when it is needed

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
