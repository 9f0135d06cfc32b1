"""The schedule of H, the number of steps between two rounds of one fragment.

Here: parsing and evaluating it. Not here: what is done with H (protocol.py). Standard library only.

The paper keeps H = 24 for the whole run. Early training wants frequent merging, so H may change with the run
[ours]: ``"1:0,2:200,24:2000"`` is H = 1 from step 0, 2 from step 200, 24 from step 2000; ``"1:0%,24:50%"``
places the changes at shares of ``max_steps``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ConfigError

__all__ = ["MILLIONTHS", "IntervalSchedule"]

MILLIONTHS = 1_000_000

_GRAMMAR = (
    'sync.interval must be a number of steps ("24") or a list "H:from_step,..." whose steps grow from 0 '
    '(as in "1:0,2:200,24:2000", or in shares of the run "1:0%,24:50%")'
)


@dataclass(frozen=True)
class IntervalSchedule:
    """H as a step function of the run's position.

    Attributes:
        starts_steps: first position of each piece, ascending, the first is 0: clock steps t, or millionths of
            max_tokens where ``by_tokens``.
        intervals_steps: H of each piece, each >= 1.
        by_tokens: the position is the share of max_tokens that has been processed.
    """

    starts_steps: tuple[int, ...]
    intervals_steps: tuple[int, ...]
    by_tokens: bool = False

    @classmethod
    def parse(cls, text: str, *, max_steps: int | None = None, max_tokens: int | None = None) -> IntervalSchedule:
        """Read a schedule from its text form.

        Args:
            text: see the module's docstring.
            max_steps: the run's length in steps; a percentage is one of it.
            max_tokens: the run's length in tokens, used for percentages where there is no ``max_steps``.

        Raises:
            ConfigError: if the text is malformed, not ascending, or needs a length that is not set.
        """
        by_tokens = "%" in str(text) and not max_steps and bool(max_tokens)
        length = MILLIONTHS if by_tokens else max_steps
        starts: list[int] = []
        intervals: list[int] = []
        for piece in str(text).split(","):
            interval_text, colon, start_text = piece.partition(":")
            if not colon and not starts:
                start_text = "0"
            start_text = start_text.strip()
            try:
                interval = int(interval_text)
                if start_text.endswith("%"):
                    share = Fraction(start_text[:-1]) / 100  # exact: as floats, 29 % of 100 is 28.999...
                    if not 0 <= share < 1:
                        raise ValueError(start_text)
                    if not length:
                        raise ConfigError(
                            f"a percentage in sync.interval ({text!r}) needs run.max_steps or run.max_tokens, and "
                            "neither is set; set it or give the positions in steps"
                        )
                    start = math.floor(share * length)
                else:
                    start = int(start_text)
                    if by_tokens and start:
                        raise ConfigError(
                            f"positions in sync.interval must all be percentages or all be steps where the run ends "
                            f"by run.max_tokens; got {text!r}"
                        )
            except ConfigError:
                raise
            except (ValueError, ZeroDivisionError):
                raise ConfigError(f"{_GRAMMAR}; got {text!r}") from None
            if interval < 1 or start < 0:
                raise ConfigError(f"{_GRAMMAR}, H at least 1; got {text!r}")
            if starts and start == starts[-1] and start_text.endswith("%"):
                intervals[-1] = interval  # two shares fall on one step of a short run: the later holds
                continue
            starts.append(start)
            intervals.append(interval)
        if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise ConfigError(f"{_GRAMMAR}; got {text!r}")
        return cls(tuple(starts), tuple(intervals), by_tokens)

    def at(self, position: int) -> int:
        """H at a position (clock step, or millionths of max_tokens), in steps."""
        interval = self.intervals_steps[0]
        for start, candidate in zip(self.starts_steps, self.intervals_steps, strict=True):
            if start > position:
                break
            interval = candidate
        return interval

    def position(self, step: int, tokens: int, max_tokens: int) -> int:
        """Where the run is: the clock step, or the share of ``max_tokens`` in millionths where ``by_tokens``."""
        return MILLIONTHS * tokens // max_tokens if self.by_tokens else step

    @property
    def shortest_steps(self) -> int:
        """The smallest H of the schedule, in steps."""
        return min(self.intervals_steps)
