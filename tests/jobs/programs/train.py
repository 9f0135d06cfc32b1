"""A small training run for test_world.py: what a user's script is, with faults on request.

usage: train.py FOLDER [R:]section.key=value ... [R:]test.key=value ...

A word that begins with "R:" is meant for rank R of the world alone. Settings of the section "test" are the program's:

    step_s      a sleep in each inner step: the device's work
    fault       what this process does to itself: exception, exit, segv, nan, buffer (another layout), hung_disk (of the
                syncer: no checkpoint is ever written to its end)
    at_step     at which of its inner steps
    steps       inner steps after which this process leaves on its own; 0: it stays to the end

Each step appends (end of the step, seconds inside learner.step) to FOLDER/steps-<learner>-<rank>.bin, on the clock of
time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pyddl

DEFAULTS = {"step_s": "0.01", "fault": "", "at_step": "20", "steps": "0"}
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def read_words(words: list[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Settings of pyddl by section, and the program's own."""
    sections: dict[str, dict[str, str]] = {}
    for word in words:
        head, colon, rest = word.partition(":")
        if colon and head.isdecimal():
            if int(head) != RANK:
                continue
            word = rest
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    own = {**DEFAULTS, **sections.pop("test", {})}
    return sections, own


class Batches:
    """Endless data with a cursor: batch ``i`` of a learner is a function of (learner, rank, i) alone."""

    def __init__(self, learner_id: int, rank: int) -> None:
        self.key = 1000 * learner_id + rank
        self.position = 0

    def __iter__(self) -> Any:
        import torch

        target = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
        while True:
            generator = torch.Generator().manual_seed(1_000_000 * self.key + self.position)
            x = torch.randn(32, 64, generator=generator)
            self.position += 1
            yield x, x @ target

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_model(with_buffer: bool = False) -> Any:
    """A fresh model, the same everywhere, and its optimizer, whose momentum must survive a restart."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    if with_buffer:
        model.register_buffer("own", torch.zeros(3))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def inner_step(model: Any, optimizer: Any, batch: Any, average: Any = lambda: None) -> Any:
    """One inner step; returns the loss."""
    x, y = batch
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    average()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def hurt(kind: str, model: Any) -> None:
    """What goes wrong in this process."""
    if kind == "exception":
        raise RuntimeError("the test's exception")
    if kind == "exit":
        os._exit(3)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "nan":
        import torch

        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")


def main() -> None:
    """Train until the run or the fault ends it."""
    folder = Path(sys.argv[1])
    sections, own = read_words(sys.argv[2:])
    sections.setdefault("run", {}).setdefault("dir", str(folder / "run"))
    if own["fault"] == "hung_disk":
        from pyddl.run import saving

        saving.write_checkpoint = lambda *_args, **_kwargs: time.sleep(3600)
    session = pyddl.init(**sections)

    import numpy as np
    import torch

    torch.set_num_threads(1)
    model, optimizer = make_model(with_buffer=own["fault"] == "buffer")
    learner = session.attach(model, optimizer)
    name = f"{learner.learner_id}-{learner.rank}"
    print(f"learner {name} attached at step {learner.step_count}", flush=True)
    log = os.open(folder / f"steps-{name}.bin", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    source = Batches(learner.learner_id, learner.rank)
    for batch in learner.shard(source):
        loss = inner_step(model, optimizer, batch, learner.average_gradients)
        time.sleep(float(own["step_s"]))
        if own["fault"] and learner.num_steps >= int(own["at_step"]):
            hurt(own["fault"], model)
        called_s = time.monotonic()
        learner.step(tokens=32, loss=loss.detach())
        ended_s = time.monotonic()
        os.write(log, struct.pack("dd", ended_s, ended_s - called_s))
        if int(own["steps"]) == learner.num_steps:
            break
    num_steps, position = learner.num_steps, source.position
    learner.close()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    np.save(folder / f"final-{name}.npy", flat)
    print(f"learner {name} done steps {num_steps} cursor {position}", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(level=logging.INFO)
    try:
        main()
    except pyddl.PyddlError as error:
        sys.stderr.write(f"refused: {error}\n")
        sys.exit(error.exit_status)
