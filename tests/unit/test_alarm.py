"""A call that blocks is ended with a sentence, whether it gives the interpreter's lock away or not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from pyddl.link.alarm import deadline, interruptible

BLOCKED = """
import ctypes, time
from pyddl.link.alarm import deadline
with deadline(0.2, "all ranks must come", lambda: "rank 3 has not", "the limit is timeouts.setup_s"):
    {call}
"""
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(60)"


def run(call: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BLOCKED.format(call=call)], capture_output=True, text=True, timeout=50)
    return done, time.monotonic() - started_s


def test_deadline_ends_a_call_that_gives_the_lock_away_and_says_who_is_missing() -> None:
    done, _ = run("time.sleep(60)")
    assert done.returncode == 1
    assert done.stderr == (
        "pyddl: all ranks must come within 0 s; rank 3 has not. Look for the error of that rank above; "
        "the limit is timeouts.setup_s.\n"
    )


def test_deadline_ends_a_call_that_keeps_the_lock() -> None:
    done, seconds = run(HOLDS_THE_LOCK)
    assert done.returncode == 1
    assert "all ranks must come within 0 s; somebody is missing." in done.stderr
    assert seconds < 30


def test_deadline_without_the_extension_ends_a_call_that_keeps_the_lock() -> None:
    text = BLOCKED.replace('lambda: "rank 3 has not"', '"rank 3 has not"').format(call=HOLDS_THE_LOCK)
    without = "import sys; sys.modules['pyddl._C'] = None\n"
    done = subprocess.run([sys.executable, "-c", without + text], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_deadline_of_a_sentence_makes_no_thread_of_python(monkeypatch) -> None:
    """None can be made while the interpreter ends (Python 3.12), and MPI_Finalize is called then."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    with deadline(30.0, "all ranks must leave MPI", "another has not"):
        pass


@pytest.mark.parametrize("call", ["pass", "raise ValueError"])
def test_deadline_that_is_met_ends_nothing(call: str) -> None:
    wait = "import time; time.sleep(3)"
    text = "try:\n" + "".join(f"    {line}\n" for line in BLOCKED.format(call=call).splitlines())
    text += f"except ValueError:\n    pass\n{wait}\nprint('alive')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_deadline_nested_in_another_is_met_on_its_own() -> None:
    with deadline(30.0, "outer", lambda: "x"), deadline(20.0, "inner", lambda: "x"):
        pass


def test_interruptible_lets_a_signal_end_a_call_that_keeps_the_lock() -> None:
    text = (
        "import ctypes, sys\nfrom pyddl.link.alarm import interruptible\n"
        f"with interruptible():\n    print('in', flush=True)\n    {HOLDS_THE_LOCK}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


def test_interruptible_leaves_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            with interruptible():
                inside = signal.getsignal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler
            assert (inside is signal.SIG_DFL) == (handler is signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)
