"""The checkpoints of a run: written beside its work, one at a time, each with a word on how it ended.

Here: the thread that writes, and what is said of a file that cannot be written. Not here: what a checkpoint holds
(syncer.py), its format (store/checkpoint.py), when one is due (core/protocol.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import CheckpointError
from ..store.checkpoint import Checkpoint, write_checkpoint
from ..store.trace import Trace

__all__ = ["Saver"]


class Saver:
    """Writes checkpoints in a thread.

    Args:
        folder: of the run; None: nothing is ever written.
        keep: the newest so many are kept.
        trace: the event tape.
        say: tells a person.

    Attributes:
        unsaved: why the last checkpoint of the run is not on disk; empty as long as nothing is known against it.
        hangs: the thread may never end.
    """

    def __init__(self, folder: Path | None, keep: int, trace: Trace, say: Callable[[str], None]) -> None:
        self.unsaved = ""
        self.hangs = False
        self._folder = folder
        self._keep = keep
        self._trace = trace
        self._say = say
        self._pool = ThreadPoolExecutor(1, "pyddl-checkpoint")
        self._writing: list[Future[Path]] = []  # oldest first; more than one only at the end of a run
        self._last: Future[Path] | None = None  # that of the run's end

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written of which it is still hoped that it will be whole."""
        return bool(self._writing) and not self.hangs

    def save(self, checkpoint: Checkpoint, *, last: bool) -> bool:
        """Start to write a checkpoint; one that is not the last of its run is left out while another is being written.

        Returns: whether it was started.
        """
        if self._folder is None:
            return False
        self.report()
        if self._writing and not last:
            self._say("the last checkpoint is still being written; this one is left out")
            return False
        self._writing.append(self._pool.submit(write_checkpoint, self._folder, checkpoint, keep=self._keep))
        if last:
            self._last = self._writing[-1]
        return True

    def report(self) -> None:
        """Say how the checkpoints that have come to their end did; called often."""
        while self._writing and self._writing[0].done():
            future = self._writing.pop(0)
            error = future.exception()
            if error is None:
                self._trace.write("CheckpointWritten", path=future.result().name)
                continue
            reason = str(error) if isinstance(error, CheckpointError) else repr(error)  # out of memory, say
            self._trace.write("CheckpointFailed", reason=reason)
            if future is self._last:
                self.unsaved = f"the end of the run is not on disk: {reason}"
                self._say(f"warning: {self.unsaved}")
            else:
                self._say(f"warning: {reason}; training goes on")

    def give_up(self, limit_s: float) -> None:
        """Wait no longer for what is being written."""
        self.hangs = True
        self.unsaved = (
            f"the last checkpoint must be written within {limit_s:.0f} s (timeouts.save_s) and was not; the file "
            f"system of {self._folder} may hang; a whole checkpoint there, if any, is an earlier one"
        )
        self._trace.write("CheckpointFailed", reason=self.unsaved)
        self._say(f"warning: {self.unsaved}")

    def close(self) -> None:
        """No further checkpoint comes."""
        self._pool.shutdown(wait=False)
