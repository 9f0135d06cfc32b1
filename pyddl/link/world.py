"""World mode: one MPI world, split into a synchronizer rank and learner groups. The only importer of mpi4py.

Here: starting MPI, the communicators, the windows, and small non-blocking operations that are polled. Not here: what is
sent (courier.py, port.py) and why (core/protocol.py).

    COMM_WORLD     rank 0 the syncer; ranks 1 + m*G .. 1 + m*G + G-1 learner m
    pair m         {syncer, learner m's ranks}: set-up messages and the window, whose memory lies on the syncer alone
    group m        learner m's ranks: gradients and orders; a second one for the link threads

A death ends only what it touches: after set-up there is no collective between syncer and learners, the learner is
always the origin, and the window of another learner belongs to another communicator.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, TransportError
from .alarm import deadline

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (rc must be set first)

__all__ = ["Group", "Pair", "ProgressThread", "Window", "Wish", "World", "mpi_version"]

log = logging.getLogger(__name__)

_SPIN_S = 0.0002
_MAX_NAP_S = 0.002
_FINALIZE_S = 3600.0  # others may still evaluate the model; this process has nothing else to do


def mpi_version() -> str:
    """The MPI library in use, in one line."""
    return MPI.Get_library_version().split("\n")[0].strip("\0 ")


class _Request:
    """A non-blocking MPI operation; keeps its buffers alive."""

    def __init__(self, request: MPI.Request, *buffers: object) -> None:
        self._request = request
        self._buffers = buffers

    def test(self) -> bool:
        return bool(self._request.Test())


class Window:
    """The learner's end of its mailbox (courier.RemoteWindow)."""

    def __init__(self, win: MPI.Win, target: int) -> None:
        self._win = win
        self._target = target
        self._words: list[_Request] = []

    def get(self, offset: int, out: NDArray[np.uint8]) -> _Request:
        """Start to read; see courier.RemoteWindow."""
        target = (offset, out.nbytes, MPI.BYTE)
        return _Request(self._win.Rget([out, MPI.BYTE], self._target, target), out)

    def put(self, offset: int, data: NDArray[np.uint8]) -> _Request:
        """Start to write; see courier.RemoteWindow."""
        target = (offset, data.nbytes, MPI.BYTE)
        return _Request(self._win.Rput([data, MPI.BYTE], self._target, target), data)

    def write_word(self, offset: int, value: int) -> None:
        """Start to replace a word; atomic, since it is an accumulate (rule 10)."""
        word = np.array([value], dtype=np.uint64)
        target = (offset, 1, MPI.UINT64_T)
        request = self._win.Raccumulate([word, MPI.UINT64_T], self._target, target, op=MPI.REPLACE)
        self._words.append(_Request(request, word))

    def flush(self) -> None:
        """Settle what was started before the read that has just been answered; see courier.RemoteWindow.

        Not MPI's Flush: over ucx that asks the target once more even if nothing is under way, and if the target stops
        in that moment it holds MPI's lock, so that the training thread stands still (docs/mpi.md). A connection keeps
        its order, so the answer has shown the arrival already; should a transport not, a checksum does not match yet
        and the syncer looks again.
        """
        self._win.Sync()  # a memory barrier, for windows in shared memory
        self._words = [word for word in self._words if not word.test()]


class Pair:
    """The communicator {syncer, one learner's ranks}: messages of the set-up and of the end, and the window."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._win: MPI.Win | None = None

    def send(self, message: dict[str, Any], to: int) -> None:
        """Send a small message as JSON; at set-up and at the end only."""
        self._comm.Send([json.dumps(message).encode(), MPI.BYTE], dest=to)

    def receive(self, source: int) -> dict[str, Any]:
        """Receive what :meth:`send` sends; watched by :func:`deadline`. Waits asleep: it may take minutes."""
        status = MPI.Status()
        while not self._comm.Iprobe(source=source, status=status):
            time.sleep(_MAX_NAP_S)
        raw = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([raw, MPI.BYTE], source=source)
        message: dict[str, Any] = json.loads(raw)
        return message

    def poll(self) -> bool:
        """Whether a message waits; also drives MPI's progress."""
        return bool(self._comm.Iprobe(source=MPI.ANY_SOURCE))

    def send_array(self, array: NDArray[Any], to: int) -> None:
        """Send an array in pieces; set-up only."""
        for piece in _pieces(array):
            self._comm.Send([piece, MPI.BYTE], dest=to)

    def receive_array(self, array: NDArray[Any], source: int) -> None:
        """Receive what :meth:`send_array` sends; set-up only."""
        for piece in _pieces(array):
            self._comm.Recv([piece, MPI.BYTE], source=source)

    def broadcast_array(self, array: NDArray[Any]) -> None:
        """From the syncer to the learner's ranks; set-up only."""
        for piece in _pieces(array):
            self._comm.Bcast([piece, MPI.BYTE], root=0)

    def expose(self, num_bytes: int) -> NDArray[np.uint8]:
        """Syncer: allocate the mailbox and expose it. Collective over the pair; the memory is zeroed."""
        self._win = MPI.Win.Allocate(num_bytes, 1, MPI.INFO_NULL, self._comm)
        self._require_unified()
        memory: NDArray[np.uint8] = np.asarray(self._win.tomemory())
        memory[:] = 0
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self._comm.Barrier()
        return memory

    def open(self) -> Window:
        """Learner: the origin's end of the mailbox. Collective over the pair."""
        self._win = MPI.Win.Allocate(0, 1, MPI.INFO_NULL, self._comm)
        self._require_unified()
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self._comm.Barrier()
        return Window(self._win, 0)

    def fence(self) -> None:
        """Make remote writes visible to local loads, and local stores to remote reads (Win.Sync)."""
        if self._win is not None:
            self._win.Sync()

    def close(self) -> None:
        """Free the window. Collective over the pair: only when all of it lives."""
        if self._win is not None:
            self._win.Unlock_all()
            self._win.Free()
            self._win = None

    def _require_unified(self) -> None:
        assert self._win is not None
        if self._win.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
            raise TransportError(
                "the windows must have the unified memory model, so that local loads see remote writes; "
                f"{mpi_version()} gives the separate one: use another MPI or transport"
            )


def _pieces(array: NDArray[Any], piece_bytes: int = 64 << 20) -> Iterator[NDArray[np.uint8]]:
    raw = array.reshape(-1).view(np.uint8)
    for start in range(0, raw.nbytes, piece_bytes):
        yield raw[start : start + piece_bytes]


class Group:
    """The ranks of one learner. Every wait is polled with back-off and has a deadline (rule 18).

    Starting an operation or waiting for one raises TransportError if MPI says that another rank is gone.

    The calls polled should come back at once, but MPICH over a network keeps its lock for ever when another thread of
    the process talks to a dead syncer. So a thread that makes no MPI call watches them, and ends the process.
    """

    def __init__(self, comm: MPI.Comm, link_comm: MPI.Comm, timeout_s: float) -> None:
        self._calls: dict[int, float] = {}  # thread -> since when it is inside MPI
        self._comm = comm
        self._link = link_comm
        self._timeout_s = timeout_s
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.mates_ended: Callable[[], str | None] = lambda: None  # sees the end of a mate's process
        if self.size > 1:
            threading.Thread(target=self._watch, name="pyddl-watch", daemon=True).start()

    def sum(self, array: NDArray[Any]) -> _Request:
        """Start an in-place sum over the ranks."""
        return self._started(lambda: self._comm.Iallreduce(MPI.IN_PLACE, array, op=MPI.SUM), "a sum", array)

    def broadcast(self, array: NDArray[Any]) -> _Request:
        """Start a broadcast from rank 0."""
        return self._started(lambda: self._comm.Ibcast(array, root=0), "a broadcast", array)

    def start(self, mine: NDArray[np.uint8], out: NDArray[np.uint8], bounds: list[tuple[int, int]]) -> _Request:
        """Start to collect every rank's slice (courier.GroupGather)."""
        counts = [high - low for low, high in bounds]
        starts = [low for low, _ in bounds]
        spec = [out, counts, starts, MPI.BYTE]
        return self._started(lambda: self._link.Iallgatherv([mine, MPI.BYTE], spec), "a gather", mine, out)

    def meet(self) -> _Request:
        """Start a barrier."""
        return self._started(self._comm.Ibarrier, "a barrier")

    def gather_strings(self, text: str) -> list[str]:
        """Every rank's string, on every rank; set-up only."""
        result: list[str] = self._comm.allgather(text)
        return result

    def wait(self, request: _Request, what: str) -> None:
        """Wait for an operation of the group.

        Raises:
            TransportError: if it is not complete after the group timeout; the message says what was waited for.
        """
        elapsed, last = 0.0, time.monotonic()
        nap = _SPIN_S
        while not self._is_done(request, what):
            now = time.monotonic()
            elapsed += min(now - last, 1.0)  # a longer pause is our own: the whole job was stopped, say
            last = now
            if elapsed > self._timeout_s:
                raise TransportError(
                    f"rank {self.rank} of {self.size} waited {elapsed:.0f} s for {what} of its learner's other "
                    "ranks (timeouts.group_s): one of them is gone or stuck; this rank ends as well"
                )
            if elapsed > _SPIN_S:
                if nap == _MAX_NAP_S and (reason := self.mates_ended()):
                    raise TransportError(f"rank {self.rank} of {self.size} waits for {what}, but {reason}")
                time.sleep(nap)
                nap = min(2 * nap, _MAX_NAP_S)

    def _started(self, start: Callable[[], MPI.Request], what: str, *buffers: object) -> _Request:
        self._calls[threading.get_ident()] = time.monotonic()
        try:
            return _Request(start(), *buffers)
        except MPI.Exception as error:  # Open MPI with ulfm; MPICH says nothing
            raise TransportError(
                f"rank {self.rank} of {self.size} starts {what}, but a rank of its learner is gone: {error}"
            ) from None
        finally:
            del self._calls[threading.get_ident()]

    def _is_done(self, request: _Request, what: str) -> bool:
        self._calls[threading.get_ident()] = time.monotonic()
        try:
            return request.test()
        except MPI.Exception as error:  # Open MPI with ulfm; MPICH says nothing
            raise TransportError(
                f"rank {self.rank} of {self.size} waits for {what}, but a rank of its learner is gone: {error}"
            ) from None
        finally:
            del self._calls[threading.get_ident()]

    def _watch(self) -> None:
        nap = min(1.0, self._timeout_s)
        watched, elapsed = 0.0, 0.0
        while True:
            time.sleep(nap)
            since = min(list(self._calls.values()), default=0.0)
            # counted in looks: a process that was stopped and goes on is not stuck
            elapsed = elapsed + nap if since and since == watched else 0.0
            watched = since
            if elapsed > self._timeout_s:
                sys.stderr.write(
                    f"pyddl: rank {self.rank} of {self.size}: a call of MPI that returns at once has not returned for "
                    f"{self._timeout_s:.0f} s (timeouts.group_s): the syncer is gone, or MPI is stuck; this rank ends\n"
                )
                sys.stderr.flush()
                os._exit(1)


class ProgressThread(threading.Thread):
    """Drives MPI's progress on the syncer (rule 15): learners' one-sided operations need it over a network.

    Set ``busy`` while something is in flight: then it polls every millisecond, else it backs off to 20 ms.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        super().__init__(name="pyddl-progress", daemon=True)
        self.busy = False
        self._pairs = pairs
        self._ending = threading.Event()

    def run(self) -> None:
        """Poll until the end."""
        nap = 0.001
        pairs = list(self._pairs)
        while not self._ending.wait(nap):
            for pair in list(pairs):
                try:
                    pair.poll()
                except MPI.Exception as error:  # Open MPI with ulfm says so when a learner has died
                    log.info("a pair communicator is given up: %s", error)
                    pairs.remove(pair)  # the other learners still need the progress
            nap = 0.001 if self.busy else min(2 * nap, 0.02)

    def end(self) -> None:
        """Stop the thread."""
        self._ending.set()
        self.join(1.0)


@dataclass(frozen=True)
class Wish:
    """What one rank has been told of the world.

    Attributes:
        num_ranks: G; None: nothing, as a syncer that takes what the learners bring.
        num_learners: M; 0: as many as fit.
        only_serves: it can only be the syncer.
    """

    num_ranks: int | None
    num_learners: int
    only_serves: bool = False


class World:
    """This process's place in the world, and the communicators it needs.

    Args:
        wish: what this process's configuration says of the world; all ranks' wishes must agree.
        group_timeout_s: deadline of every wait inside a group.

    Attributes:
        role: "syncer", "learner" or "alone".
        learner_id, num_learners, num_ranks: of this process and of the world; learner_id is -1 on the syncer.
        pairs: all of them on the syncer, one on a learner.

    Raises:
        ConfigError: on every rank alike, if the world's size does not fit 1 + M * G, or if the syncer is not rank 0.
        TransportError: if MPI does not allow several threads.
    """

    def __init__(self, wish: Wish, *, group_timeout_s: float) -> None:
        self._owns_mpi = not MPI.Is_initialized()
        if self._owns_mpi:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransportError(
                "MPI must be started with MPI_THREAD_MULTIPLE, since a thread carries the fragments beside training; "
                "call pyddl.init() before anything else starts MPI, or set mpi4py.rc.thread_level = 'multiple'"
            )
        world = MPI.COMM_WORLD
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self.learner_id = -1
        self.lost = False
        self.clean = False  # left in good order: MPI may be finalized
        self.pairs: list[Pair] = []
        self.group: Group | None = None
        if self.size == 1:
            self.role, self.num_learners, self.num_ranks = "alone", 1, 1
            return
        wishes = world.allgather(wish)
        try:
            self.num_learners, self.num_ranks = _plan(self.size, wishes)
        except ConfigError as error:
            self.leave(0, lost=False)  # every rank is refused alike: the launcher gets their status, not a crash
            error.is_told = self.rank != 0
            raise
        learner_of = [-1] + [r // self.num_ranks for r in range(self.size - 1)]
        self.learner_id = learner_of[self.rank]
        self.role = "syncer" if self.rank == 0 else "learner"
        group_comm = world.Split(self.learner_id + 1, self.rank)
        for m in range(self.num_learners):
            if self.rank == 0 or m == self.learner_id:
                members = [0, *(r for r in range(1, self.size) if learner_of[r] == m)]
                comm = world.Create_group(world.Get_group().Incl(members), tag=m)
                self.pairs.append(Pair(comm))
        if self.role == "learner":
            self.group = Group(group_comm, group_comm.Dup(), group_timeout_s)

    def require_memory(self, num_bytes: int) -> None:
        """Compare the windows with the free shared memory before MPI dies of it (rule 13).

        Raises:
            ConfigError: if they do not fit.
        """
        free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else num_bytes
        if num_bytes > free:
            raise ConfigError(
                f"the mailboxes need {num_bytes / 1e9:.2f} GB of shared memory and /dev/shm has {free / 1e9:.2f} GB "
                "free; use sync.wire=bf16, more fragments, fewer rounds in flight, or enlarge /dev/shm"
            )

    def leave(self, exit_code: int, *, lost: bool) -> None:
        """End this process's part in MPI.

        After a loss nothing of MPI is freed or finalized (it can hang, docs/mpi.md): the process ends at once with
        ``exit_code`` and this does not return. Otherwise the caller goes on; MPI is finalized if it was started here.
        """
        if lost or self.lost:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        if self._owns_mpi and not MPI.Is_finalized():
            with deadline(_FINALIZE_S, "all ranks must leave MPI", "another has not come to its end"):
                MPI.Finalize()


def _plan(size: int, wishes: list[Wish]) -> tuple[int, int]:
    """M and G from what the ranks wish, by rank; the same answer or the same error on every rank."""
    if wrong := [str(rank) for rank, wish in enumerate(wishes) if wish.only_serves and rank]:
        raise ConfigError(
            f"pyddl syncer must be rank 0 of its world, and nothing else; got it as rank {', '.join(wrong)} of {size}: "
            "mpiexec -n 1 pyddl syncer : -n N python train.py"
        )
    groups = {wish.num_ranks for wish in wishes if wish.num_ranks is not None}
    learners = {wish.num_learners for wish in wishes if wish.num_learners}
    if len(groups) > 1 or len(learners) > 1:
        raise ConfigError(
            f"all ranks must be given the same run.ranks and run.learners; got {sorted(groups)} and {sorted(learners)}"
        )
    num_ranks = next(iter(groups), 1)
    num_learners = next(iter(learners), (size - 1) // num_ranks)
    if num_learners < 1 or size != 1 + num_learners * num_ranks:
        wanted = f"1 + M * G = 1 + {num_learners} * {num_ranks} = {1 + num_learners * num_ranks} ranks"
        if not learners:
            wanted = f"1 + M * {num_ranks} ranks for some number M of learners"
        raise ConfigError(
            f"the world must have {wanted} (one syncer, then the learners); got {size}: "
            "change -n, run.learners or run.ranks"
        )
    return num_learners, num_ranks
