"""Limits on MPI calls that block: whoever waits for a rank that does not come says so and ends.

Here: :func:`deadline`. Not here: which calls it is put around (run/), waits that are polled (world.py).

Some calls of MPI hold the interpreter's lock (MPI_Init, MPI_Finalize), and no thread of Python can end those: the alarm
itself is a thread of ``pyddl._C``. Without it, which kernels.py says once, only the other calls are limited.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    from pyddl._C import Alarm
except ImportError:
    Alarm = None  # type: ignore[assignment, misc]

__all__ = ["deadline", "interruptible"]

_LATER_S = 2.0  # the thread of Python, which can say more, comes first where it can run


@contextmanager
def deadline(seconds: float, required: str, missing: Callable[[], str], remedy: str = "") -> Iterator[None]:
    """An alarm around MPI calls that block: when it rings, say what was required and who is missing, and end.

    Args:
        seconds: until the alarm.
        required: what must have happened by then, such as "all learners must attach".
        missing: who or what is missing, at that time; not asked where the interpreter's lock is held.
        remedy: which setting is the limit, if one is.
    """

    def sentence(what: str) -> str:
        end = f"Look for the error of that rank above{'; ' if remedy else ''}{remedy}."
        return f"pyddl: {required} within {seconds:.0f} s; {what}. {end}\n"

    def ring() -> None:
        sys.stderr.write(sentence(missing()))
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    alarm = None if Alarm is None else Alarm(seconds + _LATER_S, sentence("somebody has not come"))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if alarm is not None:
            alarm.cancel()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python would hear of it after the call of MPI, which may never return."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # the user's own, or ignored
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
