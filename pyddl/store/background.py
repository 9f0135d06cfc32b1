"""A tape written beside the work: a file system that hangs must hold up neither a step nor the syncer's loop.

Here: a thread that appends the lines. Not here: the file's form (trace.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .trace import Trace

__all__ = ["BackgroundTrace"]

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class BackgroundTrace(Trace):
    """A trace whose :meth:`write` returns at once; ``time_s`` is when it was called.

    Args:
        path: as for Trace; None: nothing is written, and no thread runs.
        fields: as for Trace.
    """

    def __init__(self, path: Path | None, *, fields: Mapping[str, Any]) -> None:
        super().__init__(path, fields=fields)
        self._lines: SimpleQueue[tuple[float, str, dict[str, Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._append_lines, name="pyddl-tape", daemon=True)
        if path is not None:
            self._thread.start()

    def write(self, kind: str, **fields: Any) -> None:
        """Leave a line to the thread; the values may not change afterwards. See Trace."""
        if self._thread.is_alive():
            self._lines.put((self._time_s(), kind, fields))

    def close(self) -> None:
        """Wait a bounded time for what is left, and close the file."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s took no line for %.0f s; the last lines are missing in it", self.path, _CLOSE_S)
        else:
            super().close()

    def _append_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write_at(*line)
