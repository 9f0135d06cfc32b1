"""Progress of a run on the console: a live line on a terminal, plain lines elsewhere.

Here: drawing. Not here: figures of a finished run (they are in the trace), files.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from ..config import Config

if TYPE_CHECKING:
    from ..run.syncer import Syncer

__all__ = ["open_view"]

_LINE_S = 5.0  # between plain lines
_LIVE_S = 0.25  # between redraws


class _Figures:
    """What one line shows, with the rate of tokens since the line before."""

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._time = time.monotonic()

    def line(self, syncer: Syncer) -> str:
        p = syncer.protocol
        now, tokens = time.monotonic(), p.processed_tokens
        if self._tokens is None:  # a run that is resumed has some of before it began
            self._tokens = sum(ledger.processed for ledger in p.past_ledgers.values())
        rate = (tokens - self._tokens) / max(1e-9, now - self._time)
        self._tokens, self._time = tokens, now
        losses = [x.loss for x in syncer.learners.values() if not x.lost and math.isfinite(x.loss)]
        loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
        live = sum(m.is_live for m in p.learners.values())
        achieved = p.achieved_interval_steps()
        parts = [
            f"t {p.step}",
            f"loss {loss}",
            f"{rate:,.0f} tok/s",
            f"live {live}/{len(p.learners)}",
            f"in last merge {syncer.num_in_last_merge}",
            f"merges {p.num_merges}",
            f"H {achieved:.1f}" if achieved else "H -",
        ]
        rejected = sum(p.rejected.values())
        accepted = sum(m.num_merged for m in p.learners.values())
        share = 100 * rejected / max(1, rejected + accepted)
        return "  ".join(parts) + (f"  rejected {rejected} ({share:.0f} %)" if rejected else "")


class _PlainView:
    """One line every few seconds, for logs."""

    def __init__(self) -> None:
        self._figures = _Figures()
        self._next_s = time.monotonic() + _LINE_S

    def update(self, syncer: Syncer) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _LINE_S
            self.say(self._figures.line(syncer))

    def say(self, sentence: str) -> None:
        sys.stderr.write(f"pyddl: {sentence}\n")
        sys.stderr.flush()

    def close(self) -> None:
        pass


class _LiveView:
    """A progress bar by rich, redrawn four times a second."""

    def __init__(self, config: Config) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._total = config.run.max_tokens or config.run.max_steps or None
        self._by_tokens = bool(config.run.max_tokens)
        self._bar = Progress(
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._task = self._bar.add_task("waiting for learners", total=self._total)
        self._bar.start()
        self._figures = _Figures()
        self._next_s = 0.0

    def update(self, syncer: Syncer) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _LIVE_S
            p = syncer.protocol
            done = p.processed_tokens if self._by_tokens else p.step
            self._bar.update(self._task, completed=done, description=self._figures.line(syncer))

    def say(self, sentence: str) -> None:
        self._bar.console.print(f"pyddl: {sentence}", highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


def open_view(config: Config) -> _PlainView | _LiveView:
    """The view that suits where stderr goes."""
    return _LiveView(config) if sys.stderr.isatty() else _PlainView()
