"""Verdicts for tests that run under mpiexec: a failure of one rank fails the test on all of them, and no test hangs.

A rank that fails alone would leave the others waiting at the next collective, and would not be heard of: mpiexec shows
no rank's output before its end.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_DEADLINE_S = 90.0
_stderr = 2


def pytest_configure(config: pytest.Config) -> None:
    """Start MPI before a test module imports pyddl.link.world, which would leave it to pyddl.init()."""
    global _stderr
    _stderr = os.dup(2)  # the stacks of a test that hangs must not go where pytest captures
    if config.getoption("--with-mpi", default=False):
        from mpi4py import MPI

        assert MPI.Is_initialized()


@pytest.fixture
def comm() -> Any:
    """The world, for tests; pyddl's communicators are its own."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    """One new folder that all ranks know."""
    path: Path = comm.bcast(tmp_path, root=0)
    return path


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """pyddl.init() takes signals for a run; pytest gets them back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the test on all ranks, then agree on its outcome."""
    if pyfuncitem.get_closest_marker("mpi") is None:
        return (yield)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    # a rank that has failed waits below; one that hangs shows all stacks and takes the job down
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=_stderr)
    failure = ""
    error: BaseException | None = None
    result = None
    try:
        result = yield
    except BaseException as caught:
        error = caught
        failure = f"rank {comm.rank}:\n{traceback.format_exc()}"
    failures = [text for text in comm.allgather(failure) if text]
    faulthandler.cancel_dump_traceback_later()
    if error is not None:
        raise error
    if failures:
        pytest.fail("another rank failed\n" + "\n".join(failures), pytrace=False)
    return result
