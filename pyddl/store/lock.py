"""The lock of a run directory: one launch at a time, and none left locked by a dead one.

Here: :class:`RunLock`, a file ``run.lock`` that names its holder.
Not here: which process takes it (run/ does), how a process is told from a later one (files.py).

Kernel locks (flock, fcntl) are absent, or silently local to a host, on some of the file systems that runs
live on; creating a name by link(2) is atomic on all. So a lock is a name, and no name is created twice:

- ``run.lock`` holds the record of a holder: its identity and a number drawn once, the nonce.
- Who finds the holder dead claims the succession by creating ``run.lock.after-<nonce of the dead>`` with its
  own record in it. Of many that try, link(2) lets one succeed; the others then find a living holder.
- If a successor dies, too, its own nonce names the next link. The holder is the last of this chain.
- The new holder renames its record over ``run.lock`` and then removes the links, so that the chain is short.
  (1) B reads the dead R0 in run.lock; (2) A, successor of R0, renames and removes after-R0; (3) B creates
  after-R0, which is free again. Therefore a claim counts only if the chain, read once more from its start,
  ends in it: B finds A's record in run.lock, withdraws, and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigError
from .files import ProcessIdentity, temporary_beside

__all__ = ["RunLock"]

logger = logging.getLogger(__name__)

_NAME = "run.lock"
_MAX_ATTEMPTS = 100  # each lost attempt means that another process has made progress


@dataclass(frozen=True)
class _Record:
    """Who holds, or held, the lock; ``age_s`` is the time since it was last refreshed."""

    identity: ProcessIdentity | None  # None: the file is damaged
    nonce: str
    age_s: float
    path: Path

    def is_abandoned(self, stale_s: float) -> bool:
        if self.identity is not None and self.identity.is_here():
            return self.identity.is_dead()  # a process that is here and lives may be slow; it is never robbed
        return self.age_s > stale_s


class RunLock:
    """The lock of a run directory (an exclusive file with host, pid, start time and boot id).

    A holder that died on this host is succeeded at once. One on another host, which cannot be asked, is
    succeeded when it has not refreshed for ``stale_s``; so holders call :meth:`refresh` far more often.

    Args:
        folder: the run directory; exists.
        stale_s: seconds, > 0, the same for all who use the folder.
    """

    def __init__(self, folder: str | Path, *, stale_s: float = 60.0) -> None:
        """Prepare; nothing is locked before :meth:`acquire`."""
        self.folder = Path(folder)
        self.stale_s = stale_s
        self._nonce: str | None = None  # of the lock held by this object
        self._pid = 0  # that acquired it: a forked child has a copy of this object and no lock
        self._can_refresh = True

    @property
    def path(self) -> Path:
        """The lock's file."""
        return self.folder / _NAME

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: if another process holds it (the message says who, and what to do), or if the folder
                cannot be written to.
        """
        try:
            self._acquire()
        except OSError as error:
            raise ConfigError(
                f"a run directory must be a folder that can be written to, for its lock {self.path}; "
                f"{error.strerror}; create it, or choose another run.dir"
            ) from None

    def refresh(self) -> None:
        """Show processes on other hosts that the holder lives; takes one system call or two.

        A file system that fails for the moment is logged, not raised; a lock file that somebody removed is
        put back.

        Raises:
            ConfigError: if another process has taken the lock over; this one must stop writing to the folder.
        """
        if not self._is_holder():
            raise RuntimeError("a lock must be acquired by this process before it is refreshed")
        try:
            record = self._read(self.path, now_s=None)
            if record is None:
                logger.warning("%s was removed while process %d held it; it is put back", self.path, self._pid)
                with contextlib.suppress(FileExistsError):
                    self._create(self.path)
                record = self._read(self.path, now_s=None)
            if record is not None and record.nonce == self._nonce:
                os.utime(self.path)
        except OSError as error:
            if self._can_refresh:
                logger.warning("%s could not be refreshed: %s", self.path, error.strerror)
            self._can_refresh = False
            return
        self._can_refresh = True
        if record is not None and record.nonce != self._nonce:
            raise ConfigError(
                f"this process must be the only one in {self.folder}; {_describe(record)} has taken its lock "
                f"over, which had not been refreshed for {self.stale_s:g} s; stop one of the two"
            )

    def release(self) -> None:
        """Give the lock back, if this process holds it; may be called twice."""
        if self._is_holder():
            with contextlib.suppress(OSError):
                if self._is_own(self.path):
                    self.path.unlink()
        self._nonce = None

    def __enter__(self) -> RunLock:
        """Acquire the lock."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()

    def _is_holder(self) -> bool:
        return self._nonce is not None and self._pid == os.getpid()

    def _is_own(self, place: Path) -> bool:
        record = self._read(place, now_s=None)
        return record is not None and record.nonce == self._nonce

    def _acquire(self) -> None:
        if self._is_holder():
            raise RuntimeError("a lock that is held must be released before it is acquired again")
        self._nonce = secrets.token_hex(16)
        self._pid = os.getpid()
        try:
            claim: Path | None = None
            for _ in range(_MAX_ATTEMPTS):
                chain = self._read_chain()
                if chain and chain[-1].nonce == self._nonce:
                    self._shorten(chain)
                    return
                if claim is not None and self._is_own(claim):
                    claim.unlink(missing_ok=True)  # it hangs on a record that has left the chain
                claim = None
                if chain and not chain[-1].is_abandoned(self.stale_s):
                    raise ConfigError(self._refusal(chain[-1]))
                place = self._link_after(chain[-1].nonce) if chain else self.path
                # Somebody else may be faster. Over NFS the answer of a success may be lost and that of the
                # repetition be an error; either way the chain says who it was.
                with contextlib.suppress(FileExistsError):
                    self._create(place)
                    claim = place
            raise ConfigError(
                f"a run directory must have one launch at a time; the lock {self.path} changed hands "
                f"{_MAX_ATTEMPTS} times while this process tried; start one launch only"
            )
        except BaseException:
            self._nonce = None
            raise

    def _create(self, place: Path) -> None:
        """Create ``place`` with this process's record in it, whole from its first instant."""
        temporary = temporary_beside(self.path)
        text = json.dumps({"nonce": self._nonce, **asdict(ProcessIdentity.own())}) + "\n"
        try:
            temporary.write_text(text, encoding="ascii")
            os.link(temporary, place)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            # No hard links here (FAT, some FUSE): for an instant the file is empty, which reads as damaged
            # and therefore counts as held until it is stale.
            with place.open("x", encoding="ascii") as file:
                file.write(text)
        finally:
            temporary.unlink(missing_ok=True)

    def _read_chain(self) -> list[_Record]:
        """Read the records from ``run.lock`` to the last successor; [] if the lock is free."""
        now_s = self._file_system_time_s()
        chain: list[_Record] = []
        place = self.path
        while (record := self._read(place, now_s)) is not None:
            chain.append(record)
            place = self._link_after(record.nonce)
        return chain

    def _shorten(self, chain: list[_Record]) -> None:
        """Make this process's record, the last of the chain, the first, and remove the rest."""
        if len(chain) > 1:
            former = chain[-2]
            logger.info("%s is taken over from %s, which is gone", self.path, _describe(former))
            os.replace(chain[-1].path, self.path)
            for record in chain[1:-1]:
                record.path.unlink(missing_ok=True)

    def _link_after(self, nonce: str) -> Path:
        return self.folder / f"{_NAME}.after-{nonce}"

    def _file_system_time_s(self) -> float:
        """Return the time by the clock that stamps the folder's files, which may be that of a server."""
        probe = temporary_beside(self.path)
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _read(self, place: Path, now_s: float | None) -> _Record | None:
        try:
            # Opened, and only then asked for its age: over NFS the age is up to date only after an open.
            with place.open("rb") as file:
                data = file.read()
                age_s = 0.0 if now_s is None else now_s - os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(data)
            nonce = fields.pop("nonce")
            identity = ProcessIdentity(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            # Its successor needs a name all the same, and not the name of the file itself.
            return _Record(None, hashlib.sha256(place.name.encode()).hexdigest()[:32], age_s, place)
        return _Record(identity, str(nonce), age_s, place)

    def _refusal(self, holder: _Record) -> str:
        wanted = f"a run directory must have one launch at a time; {self.folder} is held by {_describe(holder)}"
        if holder.identity is not None and holder.identity.is_here():
            return f"{wanted}, which is running; wait for it, end it, or choose another run.dir"
        return (
            f"{wanted}, refreshed {max(0.0, holder.age_s):.0f} s ago; wait for it, end it, or choose another "
            f"run.dir; if it is gone, wait until its lock is {self.stale_s:g} s old, or remove {self.path}"
        )


def _describe(record: _Record) -> str:
    if record.identity is None:
        return "an unknown process (its lock file is damaged)"
    return f"process {record.identity.pid} on host {record.identity.host}"
