"""The pool of reused buffers: what is given back is found again, and nothing is kept that no request could get."""

from __future__ import annotations

import numpy as np

from pyddl.link.buffers import BufferPool


def test_pool_buffer_given_back_is_taken_again():
    pool = BufferPool(largest=100, spares=4)
    for first, second in ((100, 100), (100, 50), (60, 90), (30, 30), (1, 1)):
        buffer = pool.take(first)
        assert buffer.shape == (first,)
        pool.give(buffer)
        again = pool.take(second)
        assert again.shape == (second,)
        assert np.shares_memory(buffer, again), (first, second)


def test_pool_buffers_in_use_are_never_handed_out_twice():
    pool = BufferPool(largest=100, spares=4)
    taken = [pool.take(n) for n in (100, 60, 60, 30, 30, 30)]
    for buffer in taken:
        pool.give(buffer)
    taken = [pool.take(n) for n in (100, 60, 60, 30, 30, 30, 30, 70)]
    for i, one in enumerate(taken):
        assert not any(np.shares_memory(one, other) for other in taken[:i])


def test_pool_keeps_so_many_spares_of_a_size_and_no_more():
    pool = BufferPool(largest=100, spares=2)
    taken = [pool.take(100) for _ in range(5)]
    for buffer in taken:
        pool.give(buffer)
    assert sum(map(len, pool._free.values())) == 2


def test_pool_foreign_array_of_a_length_that_no_request_gets_is_not_kept():
    """Of 50 to 99 floats only whole buffers of 100 are handed out: an array of 70 would lie there for ever."""
    pool = BufferPool(largest=100, spares=4)
    for n in (50, 70, 99, 101):
        pool.give(np.zeros(n, dtype=np.float32))
    assert not any(pool._free.values())
    pool.give(np.zeros(100, dtype=np.float32))
    pool.give(np.zeros(49, dtype=np.float32))
    assert {n: len(kept) for n, kept in pool._free.items() if kept} == {100: 1, 49: 1}
