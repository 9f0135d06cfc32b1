"""Seeing the end of other processes on this host.

Here: naming a process across the ranks of a run, and watching a set of them. Not here: what their end means.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["DeathWatch", "describe_self"]


def describe_self() -> list[Any]:
    """This process as [pid, namespace]; JSON-able. Equal namespaces mean that pids name the same processes."""
    return [os.getpid(), _namespace()]


def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class DeathWatch:
    """Sees the end of processes of this host at once; of others it sees nothing, there silence must do.

    Args:
        processes: as :func:`describe_self` gives them, by rank.
    """

    def __init__(self, processes: Sequence[Sequence[Any]]) -> None:
        self.processes = processes
        self._poller = select.poll()
        self._ranks: dict[int, int] = {}
        here = _namespace()
        for rank, (pid, namespace) in enumerate(processes):
            if here and namespace == here and pid != os.getpid():
                try:
                    fd = os.pidfd_open(pid)
                except OSError:  # an old kernel, or gone already: then it never answers the set-up either
                    continue
                self._ranks[fd] = rank
                self._poller.register(fd, select.POLLIN)

    def all_ended(self) -> bool:
        """Whether all of those that are seen from here have ended, and there are such."""
        return bool(self._ranks) and len(self._poller.poll(0)) == len(self._ranks)

    def ended(self) -> str | None:
        """A sentence about the first process that has ended, or None."""
        if self._ranks:
            for fd, _ in self._poller.poll(0):
                return f"the process of its rank {self._ranks[fd]} ended"
        return None
