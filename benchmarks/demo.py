"""The main job, end to end: four learners train on real text, one is killed half-way, the run goes on.

    python benchmarks/demo.py [--baseline] [--learners 4] [--steps N] [--no-kill] [section.key=value ...]

Starts ``mpiexec -n 5 pyddl train`` (world mode, MPICH) on the source text of Python's standard library, sends SIGKILL
to one learner when half of the tokens are processed, and reports. The last line is ``RESULT`` and a JSON object;
benchmarks/README.md defines its figures. With ``--baseline`` the same model is then trained in one process by a plain
AdamW loop on as many tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from worlds import Kill, result_of, run_world

from pyddl.config import load_config
from pyddl.errors import PyddlError
from pyddl.tasks import lm
from pyddl.tasks.corpus import Corpus
from pyddl.tasks.model import ByteLM

DEFAULTS = ["run.checkpoint_every_merges=1000"]
STEPS = 750
GAP_WINDOW_S = 10.0  # "around the kill": this long before and after it


def main() -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps per learner, in the mean")
    parser.add_argument("--no-kill", action="store_true", help="an undisturbed run")
    parser.add_argument("--baseline", action="store_true", help="also train the baseline, in one process")
    parser.add_argument("--folder", metavar="DIR", help="the run's folder; default: a new one under runs/")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists():
        sys.stderr.write(f"the folder must not exist yet; {folder} does: give --folder another\n")
        return 2
    try:
        result = demo(arguments, folder)
    except PyddlError as error:
        sys.stderr.write(f"pyddl: {error}\n")
        return error.exit_status
    summarize(result)
    print(f"all of it: pyddl inspect {folder}")
    print("RESULT", json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))
    return 0


def demo(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run and its figures."""
    words = [*DEFAULTS, *arguments.settings]
    config, sections = load_config(
        None, ["run.max_tokens=1", *words], sections={"lm": lm.LMConfig}, defaults=lm.RECOMMENDED
    )
    task: lm.LMConfig = sections["lm"]
    max_tokens = arguments.steps * arguments.learners * task.batch_size * task.model.context
    words += [f"run.max_tokens={max_tokens}", f"run.learners={arguments.learners}"]
    kill = Kill(arguments.learners - 2, max_tokens // 2)
    events = run_world(words, 1 + arguments.learners, folder, None if arguments.no_kill else kill)
    outcome = result_of(events)
    killed = [kill.learner_id] if kill.done else []
    print("evaluating the syncer's global model on held-out text ...", file=sys.stderr)
    held_out = Corpus.open(task.data_paths).validation_bytes(task.validation_bytes)
    start = lm.evaluate(ByteLM(task.model, seed=config.run.seed), held_out)
    end = lm.evaluate_run(folder, task)
    baseline = None
    if arguments.baseline:
        print("training the baseline in one process ...", file=sys.stderr)
        tokens = outcome["tokens"]["processed"]
        baseline = lm.baseline(task, total_tokens=tokens, data_parallel=arguments.learners, seed=config.run.seed)[
            "loss"
        ]
    lost_s = next((e["time_s"] for e in events if e["kind"] == "LearnerLost" and e["reason"] != "it left"), None)
    merges = [e["time_s"] for e in events if e["kind"] == "Publish"]
    return {
        "val_loss_start": start,
        "val_loss_end": end,
        "baseline_val_loss": baseline,
        "learners": arguments.learners,
        "killed": killed,
        "rounds_merged": len(merges),
        "rounds_after_kill": None if lost_s is None else sum(t > lost_s for t in merges),
        "rejected": outcome["rejected"],
        "achieved_H": outcome["achieved_H"],
        "tokens": outcome["tokens"]["processed"],
        "survivor_max_gap_steps": gap_steps(events, killed, lost_s, -GAP_WINDOW_S, GAP_WINDOW_S),
        "usual_max_gap_steps": gap_steps(events, killed, lost_s, -3 * GAP_WINDOW_S, -GAP_WINDOW_S),
        "merged_by_learner": outcome["merged_by_learner"],
        "outcome": outcome["outcome"],
        "seconds": outcome["seconds"],
    }


def summarize(r: dict[str, Any]) -> None:
    """The report for a person."""
    print(f"\n{r['learners']} learners, {r['tokens']:,} tokens in {r['seconds']:.0f} s: {r['outcome']}")
    print(f"held-out loss of the global model: {r['val_loss_start']:.3f} -> {r['val_loss_end']:.3f} nats per byte")
    if r["baseline_val_loss"] is not None:
        print(f"one process, plain AdamW, as many tokens: {r['baseline_val_loss']:.3f}")
    if r["killed"]:
        pauses = [r["survivor_max_gap_steps"], r["usual_max_gap_steps"]]
        around, before = ["?" if gap is None else f"{gap:.1f}" for gap in pauses]
        print(
            f"learner {r['killed'][0]} was killed: {r['rounds_after_kill']} of {r['rounds_merged']} merges came after,"
        )
        print(
            f"and no survivor paused for longer than {around} of its steps within {GAP_WINDOW_S:.0f} s of it "
            f"({before} in the {2 * GAP_WINDOW_S:.0f} s before that)"
        )


def gap_steps(
    events: list[dict[str, Any]], killed: list[int], lost_s: float | None, start_s: float, end_s: float
) -> float | None:
    """Longest pause of any survivor in a time counted from the loss, in its median steps; None: no such time."""
    if lost_s is None:
        return None
    samples = [e for e in events if e["kind"] == "Sample"]
    worst: float | None = None
    for m in {m for e in samples for m in e["learners"]} - {str(k) for k in killed}:
        own = [(e["time_s"], e["learners"][m]) for e in samples if m in e["learners"]]
        steps = [
            (t1 - t0) / (b["num_steps"] - a["num_steps"])
            for (t0, a), (t1, b) in itertools.pairwise(own)
            if b["num_steps"] > a["num_steps"]
        ]
        gaps = [x["max_gap_s"] for t, x in own if start_s <= t - lost_s <= end_s]
        if gaps and steps:
            worst = max(worst or 0.0, max(gaps) / statistics.median(steps))
    return worst


if __name__ == "__main__":
    sys.exit(main())
