"""``pyddl inspect RUN``: what a run's folder tells.

Here: figures from the event tape and the list of checkpoints. Not here: plots and reports.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..store.checkpoint import list_checkpoints, read_checkpoint
from ..store.trace import read_trace

__all__ = ["describe_run", "show_run"]


def describe_run(run: Path) -> dict[str, Any]:
    """The figures of a run, finished or not.

    Returns:
        By name, JSON-able. ``learners`` is by learner_id: inner steps really made, tokens and loss (None: not
        known) as they were seen last, once a second, and the share of the merges that hold a contribution of it.

    Raises:
        ConfigError: if the folder does not hold a run.
    """
    tape = run / "events.jsonl"
    if not tape.is_file():
        raise ConfigError(f"a run's folder must hold events.jsonl; {run} does not: give the run.dir of a run")
    merged: Counter[int] = Counter()
    lost: list[int] = []
    merges = step = 0
    last_seen: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for event in read_trace(tape):
        kind = event["kind"]
        step = max(step, event.get("t", 0), event.get("step", 0) if kind == "Sample" else 0)
        if kind == "Publish":
            merges += 1
            merged.update(event["merged"])
        elif kind == "LearnerLost" and event["reason"] != "it left":
            lost.append(event["learner_id"])
        elif kind == "Sample":
            last_seen.update(event["learners"])
        elif kind == "Result":
            result = event
    learners = {
        m: {
            "num_steps": sample["num_steps"],
            "tokens": sample["tokens"],
            "loss": loss if math.isfinite(loss := float(sample["loss"])) else None,
            "participation": merged[int(m)] / merges if merges else 0.0,
        }
        for m, sample in sorted(last_seen.items(), key=lambda item: int(item[0]))
    }
    return {
        "run": str(run),
        "step": step,
        "merges": merges,
        "learners": learners,
        "lost": lost,
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
    rows = list(_list_rows(figures))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def _list_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if name == "checkpoints":
            for c in value:
                good = f"step {c['step']}, {c['parameters']:,} elements" if c["good"] else f"BAD: {c['why']}"
                yield c["name"], good
        elif name == "learners":
            for m, x in value.items():
                done = f"{x['num_steps']:,} steps, {x['tokens']:,} tokens, loss {_format(x['loss'])}"
                yield f"learner {m}", f"{done}, in {100 * x['participation']:.0f} % of the merges"
        elif isinstance(value, dict):
            yield name, "; ".join(f"{k}: {_format(v)}" for k, v in value.items()) or "none"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, _format(value)


def _format(value: object) -> str:
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
