"""A learner's mailbox with both of its ends in one process, for tests of mailbox, port, courier and learner.

Here: the origin's end of a window over local memory, as weak as MPI allows one to be; the collectives of a group whose
ranks live in one process; a mailbox between real couriers and a real port. Not here: MPI (tests/mpi), any rule.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from pyddl.core.layout import Layout, TensorSpec, build_layout
from pyddl.errors import TransportError
from pyddl.link.buffers import BufferPool
from pyddl.link.courier import Courier, Upload
from pyddl.link.mailbox import ANNOUNCED, Geometry, UpHeader, pack
from pyddl.link.port import LearnerPort, Published

RUN_TOKEN = 0x5EED


class DiedError(BaseException):
    """The origin ended at this instruction."""


class _Operation:
    def __init__(self, window: LocalWindow, name: str, offset: int, num_tests: int, finish: Callable[[], None]) -> None:
        self._window, self._name, self._offset, self._finish = window, name, offset, finish
        self._left = num_tests
        self.complete = False

    def test(self) -> bool:
        if self.complete:
            return True
        if self._name in self._window.stuck or self._left > 0:
            self._left -= 1
            return False
        self.complete = True
        self._finish()
        self._window.record.append(("answered", self._name, self._offset))
        return True


class LocalWindow:
    """A RemoteWindow over ``memory`` in which nothing is sure to have arrived before the next flush.

    A put arrives in part at once, if ``rng`` says so, and wholly at a later :meth:`drift` or flush; a word arrives
    whole, any time before the flush. It checks rule 14: a flush only right after the board has answered and only while
    no piece moves.

    Args:
        memory: the mailbox, which the port sees.
        rng: chooses what arrives early; None: nothing does.
        num_tests: polls of an operation that say "not yet".

    Attributes:
        record: every call and every completion, in order.
        lifetime: calls that are made before the origin dies; None: it lives.
        stuck: names of operations ("get", "put") that do not complete at present.
    """

    def __init__(self, memory: np.ndarray, rng: random.Random | None = None, num_tests: int = 1) -> None:
        self.memory = memory
        self.record: list[tuple[str, str, int]] = []
        self.lifetime: int | None = None
        self.stuck: set[str] = set()
        self.corrupt_next_get_at: int | None = None
        self._rng = rng
        self._num_tests = num_tests
        self._operations: list[_Operation] = []
        self._underway: list[tuple[int, np.ndarray]] = []  # in order: what the flush will make arrive

    def _call(self, name: str, offset: int) -> None:
        if self.lifetime is not None:
            if self.lifetime == 0:
                raise DiedError
            self.lifetime -= 1
        self.record.append(("called", name, offset))

    def _start(self, name: str, offset: int, finish: Callable[[], None]) -> _Operation:
        num_tests = self._num_tests if self._rng is None else self._rng.randrange(self._num_tests + 2)
        operation = _Operation(self, name, offset, num_tests, finish)
        self._operations.append(operation)
        return operation

    def get(self, offset: int, out: np.ndarray) -> _Operation:
        self._call("get", offset)

        def finish() -> None:
            out[:] = self.memory[offset : offset + out.nbytes]
            if offset == self.corrupt_next_get_at:
                self.corrupt_next_get_at = None
                out[len(out) // 2] ^= 0x10

        return self._start("get", offset, finish)

    def put(self, offset: int, data: np.ndarray) -> _Operation:
        self._call("put", offset)
        if self._rng is not None:
            low, high = sorted(self._rng.randrange(len(data) + 1) for _ in range(2))
            self.memory[offset + low : offset + high] = data[low:high]
        # copied at its completion: until then the buffer is MPI's, and a change of it would be seen
        return self._start("put", offset, lambda: self._underway.append((offset, data.copy())))

    def write_word(self, offset: int, value: int) -> None:
        self._call("word", offset)
        assert offset % 8 == 0, "only aligned words are untorn"
        self._underway.append((offset, np.array([value], dtype=np.uint64).view(np.uint8)))
        self.drift()

    def flush(self) -> None:
        self._call("flush", 0)
        assert self.record[-2][:2] == ("answered", "get"), f"a flush without an answer before it: {self.record[-3:]}"
        assert self.record[-2][2] == 0, "what answered before the flush must be the board"
        assert not self.num_moving, "a flush while a piece moves"
        for offset, data in self._underway:
            self.memory[offset : offset + len(data)] = data
        self._underway.clear()

    def drift(self) -> None:
        """Some of what is underway arrives: words and puts in any order, but of one place in the order written."""
        if self._rng is None:
            return
        for i in range(len(self._underway)):
            offset, data = self._underway[i]
            if self._rng.random() < 0.3 and not any(o == offset for o, _ in self._underway[:i]):
                self.memory[offset : offset + len(data)] = data

    @property
    def num_moving(self) -> int:
        """Puts and gets that are started and not complete."""
        self._operations = [o for o in self._operations if not o.complete]
        return len(self._operations)

    def calls(self, name: str) -> list[int]:
        """Offsets of the calls of one kind, in order."""
        return [offset for what, kind, offset in self.record if (what, kind) == ("called", name)]


class Inline(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Collective:
    def __init__(self, kind: str, num_bytes: int) -> None:
        self.kind, self.num_bytes = kind, num_bytes
        self.inputs: dict[int, np.ndarray] = {}


class _Part:
    """One rank's handle of a collective; the result is delivered when the rank tests."""

    def __init__(self, meeting: Meeting, collective: _Collective, deliver: Callable[[list[np.ndarray]], None]) -> None:
        self._meeting, self._collective, self._deliver = meeting, collective, deliver
        self._delivered = False

    def test(self) -> bool:
        with self._meeting.lock:
            if self._delivered:
                return True
            if len(self._collective.inputs) < self._meeting.size:
                return False
            self._deliver([self._collective.inputs[r] for r in range(self._meeting.size)])
            self._delivered = True
            return True


class Meeting:
    """What the ranks of a local group share: collectives matched by their order, as MPI does it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.collectives: dict[str, list[_Collective]] = {"training": [], "link": []}

    def groups(self, timeout_s: float = 10.0) -> list[LocalGroup]:
        """One view per rank."""
        return [LocalGroup(self, rank, timeout_s) for rank in range(self.size)]


class LocalGroup:
    """A rank's view of a group in one process (world.Group), with real sums.

    A collective that meets one of another kind or size fails the rank: MPI would deliver nonsense or hang.
    """

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float = 10.0) -> None:
        self.rank, self.size = rank, meeting.size
        self.record: list[str] = []
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._position = {"training": 0, "link": 0}

    def _join(self, stream: str, kind: str, mine: np.ndarray, num_bytes: int, deliver: Any) -> _Part:
        self.record.append(f"{kind} {num_bytes}")
        with self._meeting.lock:
            started = self._meeting.collectives[stream]
            position = self._position[stream]
            self._position[stream] += 1
            if position == len(started):
                started.append(_Collective(kind, num_bytes))
            collective = started[position]
            found = (collective.kind, collective.num_bytes)
            assert found == (kind, num_bytes), f"rank {self.rank} calls {kind, num_bytes}, another called {found}"
            collective.inputs[self.rank] = mine.copy()
        return _Part(self._meeting, collective, deliver)

    def sum(self, array: np.ndarray) -> _Part:
        def deliver(inputs: list[np.ndarray]) -> None:
            array[:] = np.sum(inputs, axis=0, dtype=array.dtype)

        return self._join("training", "sum", array, array.nbytes, deliver)

    def broadcast(self, array: np.ndarray) -> _Part:
        def deliver(inputs: list[np.ndarray]) -> None:
            array[:] = inputs[0]

        return self._join("training", "broadcast", array, array.nbytes, deliver)

    def meet(self) -> _Part:
        return self._join("training", "meet", np.zeros(0), 0, lambda inputs: None)

    def start(self, mine: np.ndarray, out: np.ndarray, bounds: list[tuple[int, int]]) -> _Part:
        def deliver(inputs: list[np.ndarray]) -> None:
            for (low, high), piece in zip(bounds, inputs, strict=True):
                out[low:high] = piece

        return self._join("link", "gather", mine, out.nbytes, deliver)

    def wait(self, request: _Part, what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not request.test():
            if time.monotonic() > deadline_s:
                raise TransportError(f"rank {self.rank} of {self.size} waited too long for {what}")
            time.sleep(0.0002)


class TurnedCourier(Courier):
    """A link thread that lives by the turns that a test gives it, unless it is started."""

    was_started = False

    def start(self) -> None:
        self.was_started = True
        super().start()

    def is_alive(self) -> bool:
        return super().is_alive() if self.was_started else True


class Mailbox:
    """One learner's mailbox: its ranks' couriers, not started as threads, and the syncer's port.

    Args:
        num_ranks, num_slots, wire: of the geometry.
        sizes: floats of each tensor; each becomes a fragment of its own.
        num_counters: integers beside the first fragment.
        rng, num_tests: of the windows.
        stall_s: of the couriers.
        beating: whether the syncer has written its board once.
    """

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        num_slots: int = 2,
        wire: str = "f32",
        sizes: tuple[int, ...] = (40,),
        num_counters: int = 0,
        rng: random.Random | None = None,
        num_tests: int = 1,
        stall_s: float = 5.0,
        layout: Layout | None = None,
        beating: bool = True,
    ) -> None:
        if layout is None:
            specs = [TensorSpec(f"w{i}", (n,), "float32", "parameter") for i, n in enumerate(sizes)]
            if num_counters:
                specs.append(TensorSpec("c", (num_counters,), "int64", "counter"))
            layout = build_layout(specs, num_fragments=len(sizes), policy="tensor")
        self.layout = layout
        self.geometry = Geometry(num_slots, num_ranks, layout.largest_fragment_elements, layout.largest_counters, wire)
        self.memory = np.zeros(self.geometry.total_bytes + 64, dtype=np.uint8)
        self.memory = self.memory[-self.memory.ctypes.data % 64 :][: self.geometry.total_bytes]  # as MPI aligns it
        self.num_fences = 0
        self.port = self.new_port()
        self.published: dict[int, Published] = {}
        self.pool = BufferPool(layout.largest_fragment_elements, num_slots + 2)
        self.windows = [LocalWindow(self.memory, rng, num_tests) for _ in range(num_ranks)]
        self.groups = Meeting(num_ranks).groups()
        self.couriers = [
            TurnedCourier(
                self.windows[rank],
                self.geometry,
                layout,
                learner_id=3,
                rank=rank,
                gather=self.groups[rank] if num_ranks > 1 else None,
                run_token=RUN_TOKEN,
                stall_s=stall_s,
                pool=self.pool,
            )
            for rank in range(num_ranks)
        ]
        self._tasks = [courier.tasks() for courier in self.couriers]
        self._heartbeat = 0
        if beating:
            self.beat()

    def new_port(self, **changes: Any) -> LearnerPort:
        """The syncer's end, with nothing seen yet."""
        values: dict[str, Any] = {"learner_id": 3, "incarnation": 1, "run_token": RUN_TOKEN, "copier": Inline()}
        return LearnerPort(self.memory, self.geometry, fence=self._fence, **{**values, **changes})

    def _fence(self) -> None:
        self.num_fences += 1

    # -- the learner's side

    def turn(self, rank: int) -> None:
        """One turn of each task of a rank."""
        for task in self._tasks[rank]:
            next(task)
        self.windows[rank].drift()

    def turns(self, number: int = 12) -> None:
        """So many turns of every rank."""
        for _ in range(number):
            for rank in range(len(self.couriers)):
                self.turn(rank)

    def until(self, condition: Callable[[], bool], what: str, most: int = 3000) -> None:
        """Turns of every rank until something holds."""
        for _ in range(most):
            if condition():
                return
            self.turns(1)
        raise AssertionError(f"{what} must come within {most} turns")

    def submit(
        self,
        round_id: int,
        floats: np.ndarray,
        *,
        line: int = 0,
        fragment: int = 0,
        rank: int | None = None,
        **header: Any,
    ) -> None:
        """Every rank (or one) sends its slice of a contribution, as it goes on the wire."""
        ranks = range(len(self.couriers)) if rank is None else [rank]
        num_counters = self.layout.fragments[fragment].num_counters
        raw = floats.view(np.uint8)
        for r in ranks:
            low, high = self.geometry.slice_bytes(len(floats), r)
            fields: dict[str, Any] = {
                "run_token": RUN_TOKEN,
                "round": round_id,
                "fragment": fragment,
                "base_version": 7,
                "step": 24,
                "c_steps": 5,
                "c_tokens": 500,
                "incarnation": 1,
                "num_elements": len(floats),
                "num_counters": num_counters,
            }
            mine = UpHeader(**{**fields, **header}) if r == 0 else None
            self.couriers[r].submit(
                Upload(
                    round_id,
                    line,
                    fragment,
                    len(floats),
                    num_counters,
                    lambda low=low, high=high, mine=mine: (mine, raw[low:high].copy()),
                    np.arange(num_counters, dtype=np.int64) + round_id,
                )
            )
        self.couriers[0].announce(line, pack(round_id, fragment, ANNOUNCED))

    # -- the syncer's side

    def beat(self, **board: Any) -> None:
        """A heartbeat, and whatever else is to stand on the board."""
        self._heartbeat += 1
        words = {"step": 0, "stop_step": None, "phase": 0, "tokens": 0, "limit_step": None, **board}
        self.port.write_board(heartbeat=self._heartbeat, **words)

    def publish(
        self, fragment: int, version: int, floats: np.ndarray, *, step: int = 0, contains: int | None = None
    ) -> None:
        """A new version; it goes to the learner when a slot is free."""
        num_counters = self.layout.fragments[fragment].num_counters
        counters = np.arange(num_counters, dtype=np.int64) + version
        self.published[fragment] = Published(fragment, version, step, floats, counters)
        if contains is not None:
            self.port.downlink.contains[fragment] = contains
        self.port.downlink.offer(fragment)
        self.pump()

    def pump(self) -> None:
        """What is possible now: finish a copy, start the next."""
        self.port.read()
        self.port.downlink.pump(self.published.__getitem__)
        self.port.downlink.pump(self.published.__getitem__)


def patterns(num_elements: int) -> Iterator[np.ndarray]:
    """Endlessly many float32 vectors, each unlike the others in every element."""
    number = 0
    while True:
        number += 1
        yield np.arange(num_elements, dtype=np.float32) + 1000 * number
