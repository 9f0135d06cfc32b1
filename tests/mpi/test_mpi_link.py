"""World mode's communicators, windows and groups over real MPI; run under mpiexec -n 1 to 4."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pyddl.core.layout import TensorSpec, build_layout
from pyddl.errors import ConfigError, TransportError
from pyddl.link.alarm import deadline
from pyddl.link.buffers import BufferPool
from pyddl.link.courier import Courier, Upload
from pyddl.link.mailbox import ANNOUNCED, MERGED, Geometry, UpHeader, pack
from pyddl.link.port import LearnerPort, Published
from pyddl.link.world import Group, ProgressThread, Wish, World, _pieces, _plan, mpi_version

TOKEN = 77


def new_world(num_ranks: int | None = 1, num_learners: int = 0, group_timeout_s: float = 20.0) -> World:
    return World(Wish(num_ranks, num_learners), group_timeout_s=group_timeout_s)


# ---------------------------------------------------------------- the plan


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("size", "wishes", "plan"),
    [
        (2, (1, 0), (1, 1)),
        (5, (1, 0), (4, 1)),
        (5, (2, 0), (2, 2)),
        (5, (4, 1), (1, 4)),
        (7, (2, 3), (3, 2)),
    ],
)
def test_plan_size_that_fits_gives_learners_and_ranks(size: int, wishes: tuple[int, int], plan: tuple[int, int]):
    assert _plan(size, [Wish(*wishes)] * size) == plan
    assert _plan(size, [Wish(None, 0), *[Wish(*wishes)] * (size - 1)]) == plan, "a syncer that was told nothing"


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("size", "wishes", "wanted"),
    [
        (4, (2, 0), r"1 \+ M \* 2 ranks for some number M"),
        (2, (2, 0), r"1 \+ M \* 2 ranks for some number M"),
        (6, (2, 3), r"1 \+ M \* G = 1 \+ 3 \* 2 = 7 ranks"),
        (8, (2, 3), r"1 \+ M \* G = 1 \+ 3 \* 2 = 7 ranks"),
        (4, (1, 2), r"1 \+ M \* G = 1 \+ 2 \* 1 = 3 ranks"),
    ],
)
def test_plan_size_that_does_not_fit_says_which_would(size: int, wishes: tuple[int, int], wanted: str):
    with pytest.raises(ConfigError, match=wanted + rf".*got {size}: change -n"):
        _plan(size, [Wish(*wishes)] * size)


@pytest.mark.mpi(min_size=1)
def test_plan_ranks_that_wish_differently_are_refused():
    with pytest.raises(ConfigError, match=r"same run\.ranks and run\.learners; got \[1, 2\] and \[3\]"):
        _plan(4, [Wish(1, 0), Wish(2, 3), Wish(1, 3), Wish(1, 3)])


@pytest.mark.mpi(min_size=1)
def test_plan_syncer_that_does_not_come_first_is_refused():
    """mpiexec -n 2 python train.py : -n 1 pyddl syncer: rank 0 would serve, and rank 2 wait for ever."""
    with pytest.raises(ConfigError, match=r"pyddl syncer must be rank 0 of its world.*got it as rank 2 of 3"):
        _plan(3, [Wish(1, 0), Wish(1, 0), Wish(None, 0, only_serves=True)])
    with pytest.raises(ConfigError, match="got it as rank 1 of 4"):
        _plan(4, [Wish(None, 0, only_serves=True), Wish(None, 0, only_serves=True), Wish(1, 0), Wish(1, 0)])


@pytest.mark.mpi(min_size=3)
def test_world_wrong_size_gives_the_same_error_on_all_ranks(comm: Any):
    with pytest.raises(ConfigError, match="the world must have") as caught:
        new_world(num_ranks=comm.size)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_world_wishes_that_differ_by_rank_give_the_same_error_on_all_ranks(comm: Any):
    with pytest.raises(ConfigError, match="all ranks must be given the same") as caught:
        new_world(num_ranks=1 + comm.rank % 2)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_world_ranks_find_their_places(comm: Any):
    world = new_world()
    places = comm.allgather((world.role, world.learner_id, world.num_learners, world.num_ranks, len(world.pairs)))
    m = comm.size - 1
    assert places == [("syncer", -1, m, 1, m), *[("learner", i, m, 1, 1) for i in range(m)]]
    assert "MPICH" in mpi_version() or "Open MPI" in mpi_version()


@pytest.mark.mpi(min_size=3)
def test_world_all_ranks_in_one_group_when_asked(comm: Any):
    world = new_world(num_ranks=comm.size - 1)
    places = comm.allgather((world.role, world.learner_id, world.group and world.group.rank))
    assert places == [("syncer", -1, None), *[("learner", 0, i) for i in range(comm.size - 1)]]


@pytest.mark.mpi(min_size=1)
def test_world_of_one_is_alone(comm: Any):
    if comm.size > 1:
        pytest.skip("needs exactly one rank")
    world = new_world()
    assert (world.role, world.num_learners, world.pairs, world.group) == ("alone", 1, [], None)


@pytest.mark.mpi(min_size=1)
def test_world_does_not_finalize_an_mpi_that_somebody_else_started():
    from mpi4py import MPI

    world = new_world()
    world.leave(0, lost=False)
    assert not MPI.Is_finalized()


@pytest.mark.mpi(min_size=1)
def test_world_mailboxes_beyond_the_shared_memory_are_refused_before_mpi_dies_of_them():
    with pytest.raises(ConfigError, match=r"need 1000000\.00 GB of shared memory"):
        new_world().require_memory(10**15)


@pytest.mark.mpi(min_size=1)
def test_deadline_that_is_kept_does_nothing():
    with deadline(0.1, "all must come", lambda: "nobody"):
        pass
    time.sleep(0.2)  # it would have ended this process


# ---------------------------------------------------------------- pairs: messages


@pytest.mark.mpi(min_size=2)
def test_pair_messages_and_arrays_arrive_as_they_were_sent(comm: Any):
    world = new_world()
    arrays = [
        np.arange(100_000, dtype=np.float32),
        np.zeros(0, dtype=np.int64),
        np.array([2**62, -5], dtype=np.int64),
        np.arange(7, dtype=np.uint16),
    ]
    if world.role == "syncer":
        for m, pair in enumerate(world.pairs):
            hello = pair.receive(source=1)
            assert hello == {"learner": m, "text": "ä" * 5000}
            pair.send({"welcome": m}, to=1)
            for array in arrays:
                got = np.empty_like(array)
                pair.receive_array(got, source=1)
                np.testing.assert_array_equal(got, array)
        for pair in world.pairs:
            for array in arrays:
                pair.broadcast_array(array)
        return
    pair = world.pairs[0]
    pair.send({"learner": world.learner_id, "text": "ä" * 5000}, to=0)
    assert pair.receive(source=0) == {"welcome": world.learner_id}
    for array in arrays:
        pair.send_array(array, to=0)
    for array in arrays:
        got = np.empty_like(array)
        pair.broadcast_array(got)
        np.testing.assert_array_equal(got, array)


@pytest.mark.mpi(min_size=1)
def test_pieces_cover_an_array_in_order():
    array = np.arange(1000, dtype=np.int64)
    pieces = list(_pieces(array, piece_bytes=1024))
    assert [p.nbytes for p in pieces] == [1024] * 7 + [832]
    np.testing.assert_array_equal(np.concatenate(pieces).view(np.int64), array)
    assert list(_pieces(np.zeros(0))) == []


# ---------------------------------------------------------------- windows


def until(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} must come within {timeout_s} s"
        time.sleep(0.0005)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_window_put_get_and_words_reach_the_syncers_memory_and_come_back(comm: Any, dtype: type):
    world = new_world()
    size = 1 << 20
    payload = (np.arange(size // np.dtype(dtype).itemsize) % 60_000).astype(dtype)
    if world.role == "syncer":
        memories = [pair.expose(size + 64) for pair in world.pairs]
        progress = ProgressThread(world.pairs)
        progress.busy = True
        progress.start()
        for m, (pair, memory) in enumerate(zip(world.pairs, memories, strict=True)):
            words = memory[:64].view(np.uint64)
            assert words[3] == 0, "the memory is zeroed"

            def came(pair: Any = pair, words: Any = words, m: int = m) -> bool:
                pair.fence()
                return bool(words[1] == 2**64 - 1 - m)

            until(came, f"the word of learner {m}")
            np.testing.assert_array_equal(memory[64 : 64 + size].view(dtype), payload + dtype(m))
            memory[64 : 64 + size].view(dtype)[:] = payload + dtype(m + 100)
            pair.fence()
            words[2] = 5
        for pair in world.pairs:
            pair.close()
        progress.end()
        assert not progress.is_alive()
        return
    pair, m = world.pairs[0], world.learner_id
    window = pair.open()
    mine = payload + dtype(m)
    put = window.put(64, mine.view(np.uint8))
    until(put.test, "the put")
    window.flush()
    window.write_word(8, 2**64 - 1 - m)
    window.flush()
    words = np.zeros(8, dtype=np.uint64)

    def answered() -> bool:
        get = window.get(0, words.view(np.uint8))
        until(get.test, "the words")
        return bool(words[2] == 5)

    until(answered, "the answer")
    back = np.zeros_like(payload)
    get = window.get(64, back.view(np.uint8))
    until(get.test, "the payload")
    np.testing.assert_array_equal(back, payload + dtype(m + 100))
    pair.close()
    pair.close()  # again: nothing


@pytest.mark.mpi(min_size=2)
def test_window_words_are_never_torn(comm: Any):
    """Rule 9, probed: one writer replaces a word again and again, the syncer reads only whole ones."""
    world = new_world()
    if world.role == "syncer":
        memory = [pair.expose(128) for pair in world.pairs]
        words = [m[:128].view(np.uint64) for m in memory]
        progress = ProgressThread(world.pairs)
        progress.start()
        seen: list[set[int]] = [set() for _ in words]
        deadline = time.monotonic() + 60
        while not all(w[8] for w in words):
            assert time.monotonic() < deadline
            for w, values in zip(words, seen, strict=True):
                value = int(w[0])
                assert value >> 32 == value & 0xFFFFFFFF, f"{value:016x} is torn"
                values.add(value)
                if len(values) == 20:  # the writers go on until then: the reader may be given no time before
                    w[9] = 1
        for pair in world.pairs:
            pair.close()
        progress.end()
        return
    window = world.pairs[0].open()
    is_read = np.zeros(1, dtype=np.uint64)
    i = 0
    while i < 3000 or not is_read[0]:
        i += 1
        window.write_word(0, i << 32 | i)
        if i % 10 == 0:
            window.flush()
        if i % 1000 == 0:
            until(window.get(72, is_read.view(np.uint8)).test, "the word that ends it")
    window.write_word(64, 1)
    window.flush()
    world.pairs[0].close()


# ---------------------------------------------------------------- groups


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("operation", ["sum", "broadcast", "start", "meet"])
def test_group_operation_that_mpi_refuses_is_a_transport_error(operation: str):
    """As under ulfm, where a communicator with a dead rank is refused already when an operation starts."""
    from mpi4py import MPI

    comms = [MPI.COMM_SELF.Dup() for _ in range(2)]
    group = Group(*comms, timeout_s=1.0)
    for one in comms:
        one.Free()
    data = np.zeros(4, dtype=np.uint8)
    arguments: dict[str, tuple[Any, ...]] = {"start": (data, data.copy(), [(0, 4)]), "meet": ()}
    with pytest.raises(TransportError, match=r"rank 0 of 1 starts a .* is gone"):
        getattr(group, operation)(*arguments.get(operation, (data,)))


@pytest.mark.mpi(min_size=3)
def test_group_sum_broadcast_gather_and_meeting(comm: Any):
    world = new_world(num_ranks=comm.size - 1)
    if world.role == "syncer":
        return
    group = world.group
    assert group is not None
    total = sum(range(1, group.size + 1))
    floats = np.full(100_000, group.rank + 1, dtype=np.float32)
    integers = np.array([group.rank + 1, 2**50], dtype=np.int64)
    words = np.array([group.rank, 2**64 - 1 - group.rank], dtype=np.uint64)
    requests = [group.sum(floats), group.broadcast(words), group.sum(integers)]
    for request in requests:  # several at once, as at a boundary
        group.wait(request, "a test")
    assert set(floats.tolist()) == {total}
    assert integers.tolist() == [total, group.size * 2**50]
    assert words.tolist() == [0, 2**64 - 1]
    bounds = [(10 * r, 10 * (r + 1)) for r in range(group.size)]
    bounds[-1] = (bounds[-1][0], bounds[-1][0])  # a small fragment leaves ranks without a slice
    out = np.zeros(bounds[-1][1], dtype=np.uint8)
    low, high = bounds[group.rank]
    request = group.start(np.full(high - low, group.rank + 1, dtype=np.uint8), out, bounds)
    group.wait(request, "the slices")
    assert out.tolist() == [r + 1 for r in range(group.size - 1) for _ in range(10)]
    assert group.gather_strings("ü" * group.rank) == ["ü" * r for r in range(group.size)]
    group.wait(group.meet(), "the end")


@pytest.mark.mpi(min_size=3)
def test_group_wait_for_a_mate_that_does_not_come_has_a_deadline_and_says_what_for(comm: Any):
    world = new_world(num_ranks=comm.size - 1, group_timeout_s=0.3)
    group = world.group
    if group is not None:
        if group.rank == 0:
            array = np.zeros(1)
            request = group.sum(array)
            started = time.monotonic()
            with pytest.raises(TransportError, match=r"rank 0 of \d waited 0 s for a sum .*timeouts\.group_s"):
                group.wait(request, "a sum")
            assert 0.25 < time.monotonic() - started < 10
        comm.barrier()
        if group.rank == 0:
            deadline = time.monotonic() + 20
            while not request.test():  # late, but MPI's order must not be broken for the tests that follow
                assert time.monotonic() < deadline
        else:
            group.wait(group.sum(np.zeros(1)), "a sum")
    else:
        comm.barrier()


@pytest.mark.mpi(min_size=3)
def test_group_wait_ends_as_soon_as_a_mates_process_is_seen_to_end(comm: Any):
    world = new_world(num_ranks=comm.size - 1, group_timeout_s=60)
    group = world.group
    if group is not None and group.rank == 0:
        group.mates_ended = lambda: "the process of its rank 1 ended"
        request = group.sum(np.zeros(1))
        started = time.monotonic()
        with pytest.raises(TransportError, match="waits for a sum, but the process of its rank 1 ended"):
            group.wait(request, "a sum")
        assert time.monotonic() - started < 20
    comm.barrier()
    if group is not None and group.rank > 0:
        group.wait(group.sum(np.zeros(1)), "a sum")
    elif group is not None:
        group.mates_ended = lambda: None
        group.wait(request, "a sum")


# ---------------------------------------------------------------- courier and port


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("together", [False, True], ids=["learners", "ranks"])
def test_courier_and_port_carry_contributions_up_and_fragments_down(comm: Any, wire: str, together: bool):
    """Five rounds with payloads of several pieces; M learners, or one of as many ranks."""
    if together and comm.size < 3:
        pytest.skip("a group needs two ranks")
    world = new_world(num_ranks=comm.size - 1 if together else 1)
    num_elements = 2_500_000  # of 4 MiB pieces: three, or two
    specs = [TensorSpec("w", (num_elements,), "float32", "parameter"), TensorSpec("n", (3,), "int64", "counter")]
    layout = build_layout(specs, num_fragments=1)
    geometry = Geometry(2, world.num_ranks, num_elements, 3, wire)
    dtype = np.float32 if wire == "f32" else np.uint16

    def payload(number: int, learner_id: int) -> np.ndarray:
        return ((np.arange(num_elements) * (learner_id + 3) + number) % 65_536).astype(dtype)

    if world.role == "syncer":
        executor = ThreadPoolExecutor(2)
        ports = [
            LearnerPort(
                pair.expose(geometry.total_bytes), geometry, learner_id=m, incarnation=1, run_token=TOKEN,
                fence=pair.fence, copier=executor,
            )
            for m, pair in enumerate(world.pairs)
        ]  # fmt: skip
        progress = ProgressThread(world.pairs)
        progress.busy = True
        progress.start()
        done = [0] * len(ports)
        newest = dict.fromkeys(range(len(ports)), 0)
        beats = 0
        for round_id in range(1, 6):
            for port in ports:
                port.ask(round_id % 2, pack(round_id, 0, round_id - 1))

            def turn() -> bool:
                nonlocal beats
                beats += 1
                for m, port in enumerate(ports):
                    port.write_board(heartbeat=beats, step=0, stop_step=None, phase=0, tokens=0, limit_step=None)
                    reading = port.read()
                    for line, number in reading.commits if reading else ():
                        contribution = port.verify(line, number)
                        np.testing.assert_array_equal(contribution.floats, payload(number, m))
                        assert contribution.counters.tolist() == [number] * 3
                        port.resolve(line, number, MERGED)
                        done[m] = number
                        newest[m] = number
                        port.downlink.contains[0] = number
                        port.downlink.offer(0)
                    port.downlink.pump(
                        lambda p, m=m: Published(
                            0, newest[m], 0, payload(newest[m] + 50, m), np.full(3, newest[m], dtype=np.int64)
                        )
                    )
                return all(n == round_id for n in done) and all(port.downlink.idle for port in ports)  # noqa: B023

            until(turn, f"round {round_id}", timeout_s=40)
        for pair in world.pairs:
            pair.close()
        progress.end()
        executor.shutdown()
        return
    group, m = world.group, world.learner_id
    assert group is not None
    courier = Courier(
        world.pairs[0].open(), geometry, layout, learner_id=m, rank=group.rank,
        gather=group if group.size > 1 else None, run_token=TOKEN, stall_s=20, pool=BufferPool(num_elements, 4),
    )  # fmt: skip
    courier.start()
    low, high = geometry.slice_bytes(num_elements, group.rank)
    for round_id in range(1, 6):
        line = round_id % 2
        until(
            lambda line=line, round_id=round_id: courier.board and courier.board.rounds[line] >> 32 == round_id,
            f"round {round_id}",
        )
        mine = payload(round_id, m).view(np.uint8)[low:high].copy()
        header = UpHeader(TOKEN, round_id, 0, round_id - 1, 1, 1, 1, 1, num_elements, 3) if group.rank == 0 else None
        counters = np.full(3, round_id, dtype=np.int64)
        part = (header, mine)
        courier.submit(Upload(round_id, line, 0, num_elements, 3, lambda part=part: part, counters))
        if group.rank == 0:
            courier.announce(line, pack(round_id, 0, ANNOUNCED))
        courier.boundary_done(0.01)
        until(lambda round_id=round_id: courier.received_sequence == round_id, f"version {round_id}", timeout_s=40)
        (arrival,) = courier.arrivals(round_id)
        wanted = payload(round_id + 50, m)
        if wire == "bf16":
            wanted = (wanted.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(arrival.floats, wanted)
        assert (arrival.version, arrival.contains_round) == (round_id, round_id)
        assert arrival.counters.tolist() == [round_id] * 3
        courier.taken([arrival])
    assert courier.end(10)
    assert courier.failure is None
    assert (courier.num_damaged, courier.num_stalls) == (0, 0)
    if group.size > 1:
        group.wait(group.meet(), "the end")
    world.pairs[0].close()
