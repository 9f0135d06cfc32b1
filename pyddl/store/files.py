"""Files that are whole or absent, whatever kills the writer: used by all that store/ writes but the tape.

Here: :class:`ProcessIdentity`, which tells a living writer from a dead one, :func:`replacing`, which writes
beside the final name and renames, and the names of temporary files, by which those of the dead are found.
Not here: who may write at all (lock.py), what is in the files (checkpoint.py, export.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "replacing", "sync_folder", "temporary_beside"]

_FOREIGN_STALE_S = 600.0  # a temporary file of another host that has not grown for so long is a dead writer's
_TEMPORARY = re.compile(r"\..+\.(?P<token>[^.]+\.[0-9]+\.[0-9]+)\.[0-9]+\.tmp")
_counter = itertools.count()  # several threads of a process may write files at the same time


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, never to be confused with a later one that has the same pid.

    Attributes:
        host: name of the host.
        boot_id: of the kernel's present boot; two hosts with the same name differ in it.
        pid_namespace: within which the pid is valid; two containers of one host differ in it.
        pid: process id.
        start_ticks: when the process started, in clock ticks since boot (/proc/PID/stat, field 22).
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of this process (after a fork: of the child)."""
        pid = os.getpid()
        stat = _read_stat(pid)
        return cls(
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            pid_namespace=os.readlink("/proc/self/ns/pid"),
            pid=pid,
            start_ticks=stat[1] if stat else 0,
        )

    @property
    def token(self) -> str:
        """The identity as a part of a file name: host, pid and start, the host without dots."""
        return f"{_host_word(self.host)}.{self.pid}.{self.start_ticks}"

    def is_here(self) -> bool:
        """Whether this process could see that one: same boot of the same host, same pid namespace."""
        own = ProcessIdentity.own()
        return (self.host, self.boot_id, self.pid_namespace) == (own.host, own.boot_id, own.pid_namespace)

    def is_dead(self) -> bool:
        """Whether that process has surely ended; False also where it cannot be seen from here."""
        return self.is_here() and _is_dead(self.pid, self.start_ticks)


def temporary_beside(path: Path) -> Path:
    """Return a new name in the folder of ``path``, which says who made it, so that others may clean up."""
    return path.with_name(f".{path.name}.{ProcessIdentity.own().token}.{next(_counter)}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that ``path`` is, at any instant and after any crash, the old one or the whole new one.

    Yields the name of a temporary file in the same folder; once the body has written and closed it, it is
    forced to disk and renamed, and the folder is forced to disk. If the body raises, it is removed and
    ``path`` stays as it was. Temporary files that dead processes left in the folder are removed first.

    Raises:
        OSError: if the disk refuses.
    """
    temporary = temporary_beside(path)
    temporary.touch(exist_ok=False)
    try:
        _remove_abandoned(path.parent, temporary.stat().st_mtime)
        yield temporary
        _sync(temporary, os.O_RDONLY)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to disk, so that a rename outlives a loss of power."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_abandoned(folder: Path, now_s: float) -> None:
    """Remove what dead writers left; ``now_s`` is the time by the clock of the file system itself."""
    own = ProcessIdentity.own()
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match is None or match["token"] == own.token:
            continue
        host, pid, start_ticks = match["token"].split(".")
        file = folder / name
        with contextlib.suppress(OSError):  # another process may be cleaning up, too
            if host == _host_word(own.host):
                abandoned = _is_dead(int(pid), int(start_ticks))
            else:
                abandoned = now_s - file.stat().st_mtime > _FOREIGN_STALE_S
            if abandoned:
                file.unlink()


def _host_word(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", host) or "_"


def _is_dead(pid: int, start_ticks: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is somebody else's, but it is there
    stat = _read_stat(pid)
    if stat is None:  # /proc may hide the processes of others
        return False
    state, started = stat
    # A zombie has ended; only its parent has not looked yet.
    return state in "ZX" or started != start_ticks


def _read_stat(pid: int) -> tuple[str, int] | None:
    """State and start (clock ticks since boot) of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return fields[0], int(fields[19])
