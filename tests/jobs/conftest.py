"""Fixtures for tests that start MPI jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from jobs import Job


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    """Start jobs that are killed, with all that they started, when the test ends."""
    with ExitStack() as stack:

        def start(argv: Sequence[str], **options: Any) -> Job:
            return stack.enter_context(Job(argv, **options))

        yield start
