"""Limits on MPI calls that block: whoever waits for a rank that does not come says so and ends.

Here: :func:`deadline`, and :func:`interruptible` for Ctrl-C meanwhile. Not here: which calls they are put around (run/,
World.leave), waits that are polled (world.py).

MPI_Init and MPI_Finalize keep the interpreter's lock, and no thread of Python can end those: the alarm is a thread of
``pyddl._C``. Without that faulthandler's does it, which shows a traceback in the place of a sentence.
"""

from __future__ import annotations

import faulthandler
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
def deadline(seconds: float, required: str, missing: str | Callable[[], str], remedy: str = "") -> Iterator[None]:
    """An alarm around MPI calls that block: when it rings, say what was required and who is missing, and end.

    Args:
        seconds: until the alarm.
        required: what must have happened by then, such as "all learners must attach".
        missing: who or what is missing; a function is asked when the alarm rings, by a thread of Python. None is made
            for a string: that may be needed while the interpreter ends.
        remedy: which setting is the limit, if one is.
    """

    def sentence(what: str) -> str:
        end = f"Look for the error of that rank above{'; ' if remedy else ''}{remedy}."
        return f"pyddl: {required} within {seconds:.0f} s; {what}. {end}\n"

    def ring(ask: Callable[[], str]) -> None:
        sys.stderr.write(sentence(ask()))
        sys.stderr.flush()
        os._exit(1)

    timer: threading.Timer | None = None
    text, limit_s = missing, seconds
    if not isinstance(text, str):
        timer = threading.Timer(seconds, ring, (text,))
        timer.daemon = True
        timer.start()
        text, limit_s = "somebody is missing", seconds + _LATER_S
    cancel = _set_alarm(limit_s, sentence(text))
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        cancel()


def _set_alarm(seconds: float, sentence: str) -> Callable[[], None]:
    if Alarm is not None:
        return Alarm(seconds, sentence).cancel
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    return faulthandler.cancel_dump_traceback_later


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
