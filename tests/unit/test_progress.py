"""The figures of a progress line."""

from __future__ import annotations

import time
from types import SimpleNamespace

from scenario import every

from pyddl.core.events import LearnerJoined, Progress
from pyddl.core.protocol import Protocol, ProtocolConfig
from pyddl.view.progress import _Figures


def rate_of(line: str) -> float:
    return float(line.partition(" tok/s")[0].rpartition("  ")[2].replace(",", ""))


def test_progress_rate_after_a_resume_counts_no_tokens_from_before_it():
    protocols = []
    for _ in range(2):
        protocol = Protocol(ProtocolConfig(1, 1, interval=every(24)))
        if protocols:
            protocol.restore(protocols[0].snapshot())
        protocol.handle(LearnerJoined(0, 1), 0.0)
        step = protocol.step + 1
        protocol.handle(Progress(0, 1, step, 1, 1_000_000), 1.0)
        protocols.append(protocol)
    assert protocols[1].processed_tokens == 2_000_000
    rates = []
    for protocol in protocols:
        figures = _Figures()
        figures._time = time.monotonic() - 100
        rates.append(rate_of(figures.line(SimpleNamespace(protocol=protocol, learners={}, num_in_last_merge=0))))
    assert all(9_000 < rate < 11_000 for rate in rates), rates
