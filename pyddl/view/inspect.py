"""``pyddl inspect RUN``: what a run's folder tells.

Here: figures from the event tape and the list of checkpoints. Not here: plots and reports.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import CheckpointError, ConfigError
from ..store.checkpoint import list_checkpoints, read_checkpoint
from ..store.trace import read_trace

__all__ = ["describe_run", "show_run"]


def describe_run(run: Path) -> dict[str, Any]:
    """The figures of a run, finished or not.

    Raises:
        ConfigError: if the folder does not hold a run.
    """
    tape = run / "events.jsonl"
    if not tape.is_file():
        raise ConfigError(f"a run's folder must hold events.jsonl; {run} does not: give the run.dir of a run")
    participation: Counter[int] = Counter()
    lost: list[int] = []
    merges = step = 0
    samples: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for event in read_trace(tape):
        kind = event["kind"]
        step = max(step, event.get("t", 0), event.get("step", 0) if kind == "Sample" else 0)
        if kind == "Publish":
            merges += 1
            participation.update(event["merged"])
        elif kind == "LearnerLost" and event["reason"] != "it left":
            lost.append(event["learner_id"])
        elif kind == "Sample":
            samples = event["learners"]
        elif kind == "Result":
            result = event
    return {
        "run": str(run),
        "step": step,
        "merges": merges,
        "participation": {m: n / merges for m, n in sorted(participation.items())} if merges else {},
        "lost": lost,
        "last_losses": {m: s["loss"] for m, s in samples.items()},
        "outcome": result.get("outcome", "not finished"),
        "ended_by": result.get("ended_by", "not finished"),
        "achieved_H": result.get("achieved_H"),
        "rejected": result.get("rejected", {}),
        "tokens": result.get("tokens", {}).get("processed"),
        "tokens_times_fragments": {k: v for k, v in result.get("tokens", {}).items() if k != "processed"},
        "checkpoints": [_describe_checkpoint(path) for path in list_checkpoints(run)],
    }


def _describe_checkpoint(path: Path) -> dict[str, Any]:
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        return {"name": path.name, "good": False, "why": str(error)}
    layout = checkpoint.layout
    return {
        "name": path.name,
        "good": True,
        "step": checkpoint.step,
        "parameters": layout.num_elements,
        "fragments": len(layout.fragments),
    }


def show_run(run: Path, *, as_json: bool) -> None:
    """Print :func:`describe_run`."""
    figures = describe_run(run)
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in figures.items():
        if name == "checkpoints":
            for c in value:
                good = f"step {c['step']}, {c['parameters']:,} elements" if c["good"] else f"BAD: {c['why']}"
                table.add_row(c["name"], good)
        elif isinstance(value, dict):
            table.add_row(
                name, ", ".join(f"{k}: {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in value.items())
            )
        else:
            table.add_row(name, str(value))
    Console(highlight=False, soft_wrap=True).print(table)
