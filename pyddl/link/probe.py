"""The probe of set-up: are single words read whole between a learner's rank and the syncer (rule 9)?

Here: both sides, over any window. Not here: who is told of the result (run/session.py, run/serving.py).

Everything else rests on it: a board is a set of words that belong to nobody else, and a torn one would be a round that
was never opened, or a sequence number that was never reached. Both sides write two patterns of opposite bits by turns
and read the other's, for a few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..core.kernels import load_word, store_word

if TYPE_CHECKING:
    from .courier import RemoteWindow

__all__ = ["SyncerProbe", "probe_as_learner"]

_PATTERNS = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
_WHOLE = (0, *_PATTERNS)
_CHANGES = 64  # of the syncer's word that a rank must have seen
_NAP_S = 0.0001


def probe_as_learner(window: RemoteWindow, up_offset: int, down_offset: int) -> int:
    """Write to one word and read another until it has been seen to change often; leaves 0 in the first.

    Args:
        window: the mailbox; nothing else uses it meanwhile.
        up_offset: bytes, of a word of this rank's own.
        down_offset: bytes, of a word of the syncer's.

    Returns: torn readings; 0 where all is well.
    """
    raw = np.zeros(8, dtype=np.uint8)
    torn, changes, last, turn = 0, 0, 0, 0
    while changes < _CHANGES:
        window.write_word(up_offset, _PATTERNS[turn % 2])
        turn += 1
        value = _read(window, down_offset, raw)
        torn += value not in _WHOLE
        changes += value != last
        last = value
    window.write_word(up_offset, 0)
    _read(window, down_offset, raw)  # after it the 0 has arrived
    return torn


def _read(window: RemoteWindow, offset: int, raw: NDArray[np.uint8]) -> int:
    pending = window.get(offset, raw)
    while not pending.test():
        time.sleep(_NAP_S)
    window.flush()
    return int(raw.view(np.uint64)[0])


class SyncerProbe:
    """The syncer's side for one learner; :meth:`turn` is called until the learner says that it has finished.

    Args:
        memory: the mailbox.
        up_offsets: bytes, of the word of each rank.
        down_offset: bytes, of the word that is written here.
        fence: makes remote writes visible to local loads.

    Attributes:
        torn: torn readings so far.
    """

    def __init__(
        self, memory: NDArray[np.uint8], up_offsets: Sequence[int], down_offset: int, fence: Callable[[], None]
    ) -> None:
        self.torn = 0
        self._memory = memory
        self._up_offsets = tuple(up_offsets)
        self._down_offset = down_offset
        self._fence = fence
        self._turns = 0

    def turn(self) -> None:
        """Write the other pattern, read every rank's word."""
        store_word(self._memory, self._down_offset, _PATTERNS[self._turns % 2])
        self._turns += 1
        self._fence()
        self.torn += sum(load_word(self._memory, offset) not in _WHOLE for offset in self._up_offsets)

    def end(self) -> None:
        """Leave 0."""
        store_word(self._memory, self._down_offset, 0)
        self._fence()
