"""What pyddl costs an inner step: the same loop with and without it, in alternation. Definitions: benchmarks/README.md.

Two kinds of processes run the same inner step (a sleep, as of a host that waits for its device, a small matrix product
and a small update): the learners of a real MPI world, and control processes that never import pyddl. The parent gives
the turn to one kind of block after the other, so that whatever else the machine does hits all of them alike:

    attached    learners, learner.step() at the end of each step
    detached    the same processes, no call of pyddl; link threads and syncer go on beside them
    control     the control processes, while all processes of the world are stopped (SIGSTOP)

usage: python benchmarks/step_overhead.py [--json] [--learners M] [--rounds N] [--set section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("attached", "detached", "control")
END = 3
SLEEP_S = 0.020
STEPS_PER_BLOCK = 24
NUM_TENSORS = 24
BLOCK_LIMIT_S = 60.0
SETUP_LIMIT_S = 120.0
TURN, PIDS, DONE = 0, 8, 64  # words of the board; a turn's number and kind are one word, since nobody waits for all
BOARD_WORDS = 128


class Board:
    """Words shared by the parent and all processes, in a mapped file: whose turn it is, who has done which."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.words = np.frombuffer(mmap.mmap(file.fileno(), 8 * BOARD_WORDS), dtype=np.int64)

    def wait_for_turn(self, last: int, limit_s: float) -> tuple[int, int]:
        """The next turn after ``last`` and its kind."""
        deadline_s = time.monotonic() + limit_s
        while (word := int(self.words[TURN])) >> 2 == last:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the parent must give a turn within {limit_s:.0f} s; it did not")
            time.sleep(0.001)
        return word >> 2, word & 3

    def give_turn(self, kind: int, indices: list[int], limit_s: float) -> None:
        """Let ``indices`` make a block and wait until they have."""
        turn = (int(self.words[TURN]) >> 2) + 1
        self.words[TURN] = turn << 2 | kind
        deadline_s = time.monotonic() + limit_s
        while kind != END and any(self.words[DONE + i] != turn for i in indices):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"a block of {STEPS_PER_BLOCK} steps must end within {limit_s:.0f} s; it did not")
            time.sleep(0.005)


class InnerStep:
    """The inner step of every process: a model of ``num_elements`` f32 in 24 tensors, SGD on an eighth of it."""

    def __init__(self, num_elements: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        size = num_elements // NUM_TENSORS
        self.model = torch.nn.Module()
        for i in range(NUM_TENSORS):
            self.model.register_parameter(f"w{i}", torch.nn.Parameter(0.01 * torch.randn(size)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for p in list(self.model.parameters())[::8]:
            p.grad = torch.full_like(p, 1e-6)
        self._matrix = torch.randn(256, 256)

    def make(self) -> None:
        """Make one step."""
        import torch

        time.sleep(SLEEP_S)
        torch.mm(self._matrix, self._matrix)
        self.optimizer.step()


def run_blocks(board: Board, index: int, inner_step: InnerStep, learner: Any, folder: Path) -> None:
    """Make blocks whenever it is this kind of process's turn.

    Saves one row for each step: kind, its seconds, those inside step(), and the CPU seconds of the other threads.
    """
    mine = {2} if learner is None else {0, 1}
    board.words[PIDS + index] = os.getpid()
    rows: list[tuple[int, float, float, float]] = []
    turn = 0
    while True:
        turn, kind = board.wait_for_turn(turn, SETUP_LIMIT_S)
        if kind == END:
            break
        if kind not in mine:
            continue
        others_s = time.process_time() - time.thread_time()
        for _ in range(STEPS_PER_BLOCK):
            started_s = time.perf_counter()
            inner_step.make()
            called_s = time.perf_counter()
            if kind == 0:
                learner.step(tokens=1)
            ended_s = time.perf_counter()
            rows.append((kind, ended_s - started_s, ended_s - called_s, 0.0))
        others_s = (time.process_time() - time.thread_time() - others_s) / STEPS_PER_BLOCK
        rows[-STEPS_PER_BLOCK:] = [(*row[:3], others_s) for row in rows[-STEPS_PER_BLOCK:]]
        board.words[DONE + index] = turn
    np.save(folder / f"steps-{index}.npy", np.array(rows))


def run_learner(arguments: argparse.Namespace) -> None:
    """One rank of the world; the syncer's never comes back from init()."""
    import pyddl

    sections: dict[str, dict[str, str]] = {}
    for word in arguments.set:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    folder = Path(arguments.folder)
    board = Board(folder / "board")
    if os.environ.get("PMI_RANK") == "0":
        board.words[PIDS] = os.getpid()
    session = pyddl.init(**sections)
    inner_step = InnerStep(arguments.elements)
    learner = session.attach(inner_step.model, inner_step.optimizer)
    try:
        run_blocks(board, 1 + learner.learner_id, inner_step, learner, folder)
    finally:
        learner.close()


def run_control(arguments: argparse.Namespace) -> None:
    """One control process."""
    folder = Path(arguments.folder)
    run_blocks(Board(folder / "board"), arguments.index, InnerStep(arguments.elements), None, folder)


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[np.ndarray[Any, Any]], float]:
    """Start all processes, give the turns; returns each process's rows, and the syncer's share of a core."""
    num_learners = arguments.learners
    (folder / "board").write_bytes(bytes(8 * BOARD_WORDS))
    board = Board(folder / "board")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise SystemExit("an mpiexec is needed to start the world; none was found: pip install mpich")
    common = [
        sys.executable, __file__, "--folder", str(folder), "--elements", str(arguments.elements),
        *(word for setting in arguments.set for word in ("--set", setting)),
    ]  # fmt: skip
    world = [*common, "--role", "learner"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("wb")
    started: list[subprocess.Popen[bytes]] = []
    learners = list(range(1, 1 + num_learners))
    controls = list(range(1 + num_learners, 1 + 2 * num_learners))
    try:
        started.append(subprocess.Popen([mpiexec, "-n", str(1 + num_learners), *world], env=environment, stderr=log))
        for index in controls:
            words = [*common, "--role", "control", "--index", str(index)]
            started.append(subprocess.Popen(words, env=environment, stderr=log))
        deadline_s = time.monotonic() + SETUP_LIMIT_S
        while any(board.words[PIDS + i] == 0 for i in [0, *learners, *controls]):
            if time.monotonic() > deadline_s or any(p.poll() is not None for p in started):
                raise SystemExit(
                    f"all processes must be up within {SETUP_LIMIT_S:.0f} s; see below\n" + read_log(folder)
                )
            time.sleep(0.02)
        pids = [int(board.words[PIDS + i]) for i in [0, *learners]]
        syncer_s = np.zeros(2)
        for number in range(arguments.rounds + 1):
            # a different order each time: no kind always follows the same other one
            for kind in np.roll([0, 1, 2], number % 3):
                if kind == 2:
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                try:
                    cpu_s, started_s = cpu_seconds(pids[0]), time.monotonic()
                    board.give_turn(int(kind), controls if kind == 2 else learners, BLOCK_LIMIT_S)
                    if kind != 2:
                        syncer_s += np.array([cpu_seconds(pids[0]) - cpu_s, time.monotonic() - started_s])
                finally:
                    if kind == 2:
                        for pid in pids:
                            os.kill(pid, signal.SIGCONT)
        board.give_turn(END, [], 0)
        for process in started:
            if process.wait(BLOCK_LIMIT_S) != 0:
                raise SystemExit("a process has failed; its log:\n" + read_log(folder))
    finally:
        for process in started:
            process.kill()
        log.close()
    warm_up = STEPS_PER_BLOCK  # the first block of each kind: first touch of buffers
    result = []
    for index in [*learners, *controls]:
        rows = np.load(folder / f"steps-{index}.npy")
        result.append(np.concatenate([rows[rows[:, 0] == kind][warm_up:] for kind in range(3)]))
    return result, float(syncer_s[0] / syncer_s[1])


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_log(folder: Path) -> str:
    """What the processes said."""
    return (folder / "log").read_text(errors="replace")[-4000:]


def block_medians(rows: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
    """Median step of each block of a kind, seconds."""
    steps = rows[rows[:, 0] == kind][:, 1]
    return np.asarray(np.median(steps.reshape(-1, STEPS_PER_BLOCK), axis=1))


def summarize(all_rows: list[np.ndarray[Any, Any]], syncer_share: float) -> dict[str, Any]:
    """The metrics of benchmarks/README.md."""
    rows = np.concatenate(all_rows)
    num = len(all_rows) // 2
    medians = [np.mean([m for r in all_rows if len(m := block_medians(r, k))], axis=0) for k in range(3)]
    steps = [rows[rows[:, 0] == k][:, 1] for k in range(3)]
    calls = rows[rows[:, 0] == 0][:, 2]
    report: dict[str, Any] = {"num_learners": num, "num_steps_per_kind": len(steps[0])}
    for k, kind in enumerate(KINDS):
        report[f"{kind}_median_s"] = float(np.median(steps[k]))
        report[f"{kind}_p99_s"] = float(np.quantile(steps[k], 0.99))
    for k, kind in ((1, "detached"), (2, "control")):
        ratios = medians[0] / medians[k]
        report[f"median_ratio_to_{kind}"] = float(np.median(steps[0]) / np.median(steps[k]))
        report[f"median_ratio_to_{kind}_quartiles"] = [float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75])]
        report[f"p99_ratio_to_{kind}"] = float(np.quantile(steps[0], 0.99) / np.quantile(steps[k], 0.99))
    report["call_median_s"] = float(np.median(calls))
    report["call_p99_s"] = float(np.quantile(calls, 0.99))
    report["call_share"] = float(calls.sum() / steps[0].sum())
    report["link_cpu_s"] = float(rows[rows[:, 0] == 0][:, 3].mean())
    report["syncer_cpu_share"] = syncer_share
    return report


def show(report: dict[str, Any]) -> None:
    """The same figures as a table."""
    print(f"{report['num_learners']} learners, {report['num_steps_per_kind']} steps of each kind")
    print(f"{'':10}{'median':>10}{'p99':>10}")
    for kind in KINDS:
        print(f"{kind:10}{1e3 * report[f'{kind}_median_s']:8.2f}ms{1e3 * report[f'{kind}_p99_s']:8.2f}ms")
    for kind in KINDS[1:]:
        low, middle, high = report[f"median_ratio_to_{kind}_quartiles"]
        print(
            f"attached / {kind}: median {report[f'median_ratio_to_{kind}']:.4f} "
            f"(of blocks {low:.4f} {middle:.4f} {high:.4f}), p99 {report[f'p99_ratio_to_{kind}']:.3f}"
        )
    print(
        f"learner.step(): median {1e6 * report['call_median_s']:.0f} us, p99 {1e6 * report['call_p99_s']:.0f} us, "
        f"{100 * report['call_share']:.2f} % of the attached steps"
    )
    print(
        f"CPU: link thread {1e3 * report['link_cpu_s']:.2f} ms per step, "
        f"syncer {100 * report['syncer_cpu_share']:.0f} % of a core"
    )


def main() -> None:
    """Parse the command line; play the role that it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--learners", type=int, default=1, help="M (default 1)")
    parser.add_argument("--rounds", type=int, default=30, help=f"blocks of {STEPS_PER_BLOCK} steps of each kind")
    parser.add_argument("--elements", type=int, default=10_000_000, help="parameters of the model, f32")
    parser.add_argument("--set", action="append", default=[], help="a setting of pyddl, section.key=value")
    parser.add_argument("--role", choices=("parent", "learner", "control"), default="parent", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "learner":
        run_learner(arguments)
    elif arguments.role == "control":
        run_control(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = summarize(*measure(arguments, Path(folder)))
        report["settings"] = vars(arguments)
        report["machine"] = {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        }
        if arguments.json:
            print(json.dumps(report))
        else:
            show(report)


if __name__ == "__main__":
    main()
