"""Reused float32 buffers, so that no fragment costs fresh pages from the kernel at each round.

Here: one pool per process. Not here: who holds a buffer how long (courier.py, run/exchange.py).
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]


class BufferPool:
    """Buffers of up to ``largest`` floats. Thread-safe.

    Requests for at least half of ``largest`` share buffers of the full size, so that fragments of nearly equal size do
    not each keep spares of their own; smaller ones are kept by exact size.

    Args:
        largest: floats of the largest request.
        spares: free buffers kept per size.
    """

    def __init__(self, largest: int, spares: int) -> None:
        self._largest = largest
        self._spares = spares
        self._free: dict[int, list[NDArray[np.float32]]] = {}
        self._lock = threading.Lock()

    def take(self, num_elements: int) -> NDArray[np.float32]:
        """A buffer of ``num_elements`` floats with arbitrary content."""
        capacity = self._capacity(num_elements)
        with self._lock:
            free = self._free.get(capacity)
            base = free.pop() if free else None
        if base is None:
            base = np.empty(max(capacity, num_elements), dtype=np.float32)
        return base[:num_elements]

    def give(self, buffer: NDArray[np.float32]) -> None:
        """Hand back what :meth:`take` gave; nobody may use it any more. What no request could get is not kept."""
        base = buffer.base if isinstance(buffer.base, np.ndarray) else buffer
        if len(base) != self._capacity(len(base)):
            return
        with self._lock:
            free = self._free.setdefault(len(base), [])
            if len(free) < self._spares:
                free.append(base)

    def _capacity(self, num_elements: int) -> int:
        return self._largest if 2 * num_elements >= self._largest else num_elements
