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

__all__ = ["IntervalSchedule"]

_GRAMMAR = (
    'sync.interval must be a number of steps ("24") or a list "H:from_step,..." whose steps grow from 0 '
    '(as in "1:0,2:200,24:2000", or in shares of run.max_steps "1:0%,24:50%")'
)


@dataclass(frozen=True)
class IntervalSchedule:
    """H as a step function of the syncer's clock t.

    Attributes:
        starts_steps: first clock step of each piece, ascending, the first is 0.
        intervals_steps: H of each piece, each >= 1.
    """

    starts_steps: tuple[int, ...]
    intervals_steps: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, *, max_steps: int | None = None) -> IntervalSchedule:
        """Read a schedule from its text form.

        Args:
            text: see the module's docstring.
            max_steps: the run's length in steps; needed when a position is a percentage.

        Raises:
            ConfigError: if the text is malformed, not ascending, or needs a ``max_steps`` that is not set.
        """
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
                    if max_steps is None:
                        raise ConfigError(
                            f"a percentage in sync.interval ({text!r}) needs run.max_steps, which is not "
                            "set; set it or give the positions in steps"
                        )
                    start = math.floor(share * max_steps)
                else:
                    start = int(start_text)
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
        return cls(tuple(starts), tuple(intervals))

    def at(self, step: int) -> int:
        """H at clock step ``step``, in steps."""
        interval = self.intervals_steps[0]
        for start, candidate in zip(self.starts_steps, self.intervals_steps, strict=True):
            if start > step:
                break
            interval = candidate
        return interval

    @property
    def shortest_steps(self) -> int:
        """The smallest H of the schedule, in steps."""
        return min(self.intervals_steps)
