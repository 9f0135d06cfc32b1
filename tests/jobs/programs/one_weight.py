"""A learner's script for test_trajectory.py: one weight with a constant gradient, in lock-step.

usage: one_weight.py FOLDER SIGNAL VICTIM STEP GRADIENT,... [section.key=value ...]
The learner VICTIM sends itself the signal right after its STEP-th step. Prints one line per learner.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys

import torch

import pyddl

LR = 0.5


def main() -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)
    folder, number, victim, at_step, gradients, *words = sys.argv[1:]
    config, _ = pyddl.load_config(None, [f"run.dir={folder}", *words])
    session = pyddl.init(config)
    weight = torch.nn.Parameter(torch.tensor([8.0]))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=LR)
    learner = session.attach(model, optimizer)
    gradient = float(gradients.split(",")[learner.learner_id])
    path = []
    while learner.running:
        (weight * gradient).sum().backward()
        learner.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=1)
        path.append(weight.item())
        if learner.learner_id == int(victim) and learner.num_steps == int(at_step):
            os.kill(os.getpid(), signal.Signals[number])
    learner.close()
    report = {"learner": learner.learner_id, "path": path, "final": weight.item()}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
