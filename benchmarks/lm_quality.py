"""What decoupling costs in validation loss, at equal total tokens: real worlds, the syncer's global model.

    python benchmarks/lm_quality.py [--seeds 3] [--steps 500] [--curve] [--json FILE] [section.key=value ...]

Each row is a set of real runs (mpiexec, MPICH), three seeds each: parameters, data order and batches differ by seed.
benchmarks/README.md says how each row is trained. ``--curve`` adds the gap to data parallel over the length of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from worlds import HalfSpeed, Kill, Tape, result_of, run_world

from pyddl.config import load_config
from pyddl.errors import PyddlError
from pyddl.tasks import lm

LEARNERS = 4
FIXED = "24"


@dataclass(frozen=True)
class Row:
    """One way to train; settings on top of the defaults."""

    name: str
    learners: int
    ranks: int
    settings: tuple[str, ...] = ()
    lockstep_share: float = 0.0  # of the steps
    tokens_share: float = 1.0  # of what the other rows train on
    disturb: Callable[[int], Callable[[Tape], None]] | None = None  # made from the run's number of tokens


def rows(victim: int = LEARNERS - 2) -> list[Row]:
    """The rows of the table; the first is what the others are compared with."""
    identity = ("sync.receipt=rebase", f"sync.interval={FIXED}")  # one learner: a merge changes nothing
    lockstep = ("sync.num_fragments=1", f"sync.quorum={LEARNERS}", "sync.lockstep_steps=1000000000")
    return [
        Row("data parallel", 1, LEARNERS, identity),
        Row("one learner alone", 1, 1, identity),
        Row("one learner alone, a quarter of the tokens", 1, 1, identity, tokens_share=1 / LEARNERS),
        Row("DiLoCo, K = M, no overlap", LEARNERS, 1, (f"sync.interval={FIXED}", *lockstep)),
        Row("decoupled, H = 24 fixed", LEARNERS, 1, (f"sync.interval={FIXED}",)),
        Row("decoupled", LEARNERS, 1),
        Row("decoupled, one at half speed", LEARNERS, 1, disturb=lambda _tokens: HalfSpeed(victim)),
        Row("decoupled, one killed half-way", LEARNERS, 1, disturb=lambda tokens: Kill(victim, tokens // 2)),
        Row("decoupled after a lock-step start (25 %)", LEARNERS, 1, lockstep_share=0.25),
    ]


def main() -> int:
    """Run the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="inner steps per learner, in the mean")
    parser.add_argument("--curve", action="store_true", help="afterwards two rows at 1/4, 1/2 and 2 times the steps")
    parser.add_argument("--only", help="only rows whose name contains this, and data parallel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 100:
        parser.error("--seeds must be at least 1 and --steps at least 100 (--curve takes a quarter of them)")
    try:
        steps: int = arguments.steps
        chosen = [r for r in rows() if not arguments.only or r.name == "data parallel" or arguments.only in r.name]
        tables = [(steps, chosen)]
        if arguments.curve:
            two = [r for r in rows() if r.name in ("data parallel", "decoupled")]
            tables += [(length, two) for length in (steps // 4, steps // 2, 2 * steps)]
        report: dict[str, Any] = {
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__},
            "settings": arguments.settings,
            "rows": [],
        }
        for length, chosen in tables:
            table = [measure(row, length, arguments.seeds, arguments.settings) for row in chosen]
            show(table, length)
            report["rows"] += table
    except PyddlError as error:
        sys.stderr.write(f"pyddl: {error}\n")
        return error.exit_status
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(row: Row, steps: int, num_seeds: int, settings: list[str]) -> dict[str, Any]:
    """All seeds of one row."""
    runs = []
    for seed in range(num_seeds):
        started = time.monotonic()
        runs.append(train(row, steps, seed, settings))
        r = runs[-1]
        print(
            f"{row.name}, {steps} steps, seed {seed}: loss {r['loss']:.4f}, H {r['achieved_H']}, {r['outcome']}, "
            f"{time.monotonic() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return {"name": row.name, "steps": steps, "losses": [r["loss"] for r in runs], "runs": runs}


def train(row: Row, steps: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """One run, evaluated on the syncer's global model."""
    words = [*settings, *row.settings, f"run.seed={seed}"]
    if row.lockstep_share:
        words.append(f"sync.lockstep_steps={int(row.lockstep_share * steps)}")
    sections = {"lm": lm.LMConfig}
    task: lm.LMConfig = load_config(None, ["run.max_tokens=1", *words], sections=sections, defaults=lm.RECOMMENDED)[1][
        "lm"
    ]
    tokens = int(row.tokens_share * steps * LEARNERS * task.batch_size * task.model.context)
    words += [f"run.learners={row.learners}", f"run.ranks={row.ranks}", f"run.max_tokens={tokens}"]
    with tempfile.TemporaryDirectory(prefix="pyddl-quality-") as scratch:
        folder = Path(scratch) / "run"
        disturb = row.disturb(tokens) if row.disturb else None
        result = result_of(run_world(words, 1 + row.learners * row.ranks, folder, disturb, quiet=True))
        loss = lm.evaluate_run(folder, task)
    keys = ("achieved_H", "num_merges", "rejected", "tokens", "merged_by_learner", "seconds", "outcome")
    return {"seed": seed, "loss": loss, **{k: result[k] for k in keys}}


def show(table: list[dict[str, Any]], steps: int) -> None:
    """Print one table: median loss, spread, gap to the first row seed by seed."""
    print(f"\n{steps} steps per learner, validation loss of the global model, nats per byte")
    print(f"{'':42} {'median':>8} {'spread':>8} {'gap':>8} {'gap, all seeds'}")
    base = table[0]["losses"]
    for row in table:
        losses = row["losses"]
        gaps = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
        row["gaps_percent"] = gaps
        print(
            f"{row['name']:42} {statistics.median(losses):8.4f} {max(losses) - min(losses):8.4f} "
            f"{statistics.median(gaps):+7.2f}% {' '.join(f'{g:+.2f}' for g in gaps)}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
