"""Frozen tensors are compared at the start and on resume; with MPI: tests/mpi/test_mpi_session.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pyddl.run.hello import frozen_change, frozen_difference


def test_frozen_difference_of_equal_tensors_is_none():
    assert frozen_difference([{"a": 1, "b": 2}] * 3, "learner") == ""
    assert frozen_difference([{}, {}], "learner") == ""


def test_frozen_difference_names_the_first_tensors_and_all_who_differ():
    names = ["a", "b", "c", "d", "e"]
    first = dict.fromkeys(names, 1)
    sentence = frozen_difference([first, {**first, "b": 2}, first, {**first, "b": 3, "c": 4}], "learner")
    assert "b, c of learner 1, 3 differ from those of learner 0" in sentence
    assert "load the same values everywhere" in sentence
    sentence = frozen_difference([first, dict.fromkeys(names, 2)], "learner")
    assert "a, b, c and 2 more of learner 1 differ" in sentence


def test_frozen_change_of_equal_tensors_is_none():
    assert frozen_change({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x.h5") == ""
    assert frozen_change({}, {}, "x.h5") == ""


def test_frozen_change_names_the_first_tensors_the_checkpoint_and_what_to_do():
    names = ["a", "b", "c", "d", "e"]
    then = dict.fromkeys(names, 1)
    sentence = frozen_change(then, {**then, "d": 2}, "runs/a/checkpoint-5.h5")
    assert "; d differ from those of runs/a/checkpoint-5.h5: load the values that the run began with" in sentence
    assert "; a, b, c and 2 more differ" in frozen_change(then, dict.fromkeys(names, 0), "x.h5")
    assert "; b differ" in frozen_change({"a": 1}, {"a": 1, "b": 0}, "x.h5"), "not known of then: not the same"


SCRIPT = """
import torch, pyddl
from torch.utils.data import DataLoader, TensorDataset
session = pyddl.init(run={"max_steps": 200})
model = torch.nn.Linear(4, 2)
print("the script runs", flush=True)
learner = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
for x, y in learner.shard(DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="forkserver")):
    learner.step(tokens=4)
"""


def test_script_that_its_workers_import_again_is_told_so_and_ends(tmp_path: Path):
    """The fork server preloads the script, and starting MPI in it once more took the job down or hung it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PMIX", "SLURM_", "HYD"))}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the script runs" in done.stdout, "in the process that was started it is not refused"
    assert done.returncode != 0
    assert 'under if __name__ == "__main__":' in done.stderr
