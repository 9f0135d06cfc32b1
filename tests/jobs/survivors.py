"""An MPI program for test_guard.py: a syncer, learners that write into its memory, and learners that die.

usage: survivors.py HOW VICTIMS [RUN_S]; VICTIMS are ranks, comma-separated. Same shape as a run in world
mode: per learner a pair communicator and a window with memory on rank 0 alone, passive target, no collective
after set-up.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time

from pyddl.run import guard

LINE = "#" * 199 + "\n"
NUM_LINES = 500
PAYLOAD_BYTES = 4 << 20
HEADER_BYTES = 4096
DEADLINE_S = 20.0


def main() -> None:
    how, victims = sys.argv[1], {int(word) for word in sys.argv[2].split(",")}
    run_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.7
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if how == "restart" and guard.GUARD_VARIABLE not in os.environ:
        guard.restart_under_guard()

    import mpi4py

    mpi4py.rc.finalize = False
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.rank
    if how == "early":
        world.Barrier()
        guard.unlink_segments()
        if rank in victims:
            os._exit(1)
    learners = range(1, world.size)
    pairs, windows = {}, {}
    for learner in learners:
        if rank in (0, learner):
            pair = world.Create_group(world.group.Incl([0, learner]), tag=learner)
            window = MPI.Win.Allocate(PAYLOAD_BYTES + HEADER_BYTES if rank == 0 else 0, 1, comm=pair)
            if rank == learner:
                window.Lock_all(MPI.MODE_NOCHECK)
            pairs[learner], windows[learner] = pair, window
    world.Barrier()
    guard.protect()
    print(f"rank {rank} ready", flush=True)

    stop = threading.Event()

    def die() -> None:
        if how == "exit":
            os._exit(75)
        if how == "exception":
            raise RuntimeError("the victim's exception")
        if how == "abort":
            world.Abort(3)
        os.kill(os.getpid(), signal.SIGSEGV if how == "segv" else signal.SIGKILL)

    def leave(line: str) -> None:
        stop.set()
        print(LINE * NUM_LINES, flush=True)
        time.sleep(0.1)  # the launcher cuts a long stream anywhere and mixes the ranks; a line alone stays whole
        print(line, flush=True)
        os._exit(0)  # after a loss MPI_Finalize would wait for the dead

    if rank == 0:
        words = {m: np.frombuffer(w.tomemory(), np.int64, 2) for m, w in windows.items()}
        survivors = [m for m in learners if how == "none" or m not in victims]

        def drive() -> None:
            while not stop.wait(0.001):
                pairs[1].Iprobe()

        threading.Thread(target=drive, daemon=True).start()
        deadline = time.monotonic() + DEADLINE_S
        while not all(words[m][1] for m in survivors):
            if time.monotonic() > deadline:
                leave(f"syncer missed the end of {[m for m in survivors if not words[m][1]]}")
            time.sleep(0.005)
        leave("syncer complete")

    window = windows[rank]
    payload = np.full(PAYLOAD_BYTES, rank, np.uint8)

    def store(index: int, value: int) -> None:
        origin = [np.array([value], np.int64), MPI.INT64_T]
        window.Accumulate(origin, 0, [8 * index, 1, MPI.INT64_T], op=MPI.REPLACE)
        window.Flush(0)

    def link() -> None:
        count = 0
        while not stop.is_set():
            request = window.Rput(payload, 0, [HEADER_BYTES, PAYLOAD_BYTES, MPI.BYTE])
            while not request.Test():
                time.sleep(0.0005)
            window.Flush(0)
            count += 1
            store(0, count)
            time.sleep(0.01)

    writer = threading.Thread(target=link, daemon=True)
    writer.start()
    time.sleep(run_s / 2)
    if rank in victims and how != "none":
        die()
    time.sleep(run_s / 2)
    stop.set()
    writer.join(DEADLINE_S)
    store(1, 1)
    leave(f"learner {rank} complete")


if __name__ == "__main__":
    main()
