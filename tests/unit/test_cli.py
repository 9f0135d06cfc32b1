"""The command line: mistakes get one sentence and exit status 2, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyddl.cli import main

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYD", "OMPI", "PMIX", "SLURM"))}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sync.quorun=2"], "unknown setting sync.quorun in the command line; did you mean sync.quorum?"),
        (["synk.quorum=2"], "did you mean sync?"),
        (["lm.widht=64"], "did you mean lm.width?"),
        (["sync.quorum=0"], "sync.quorum must be at least 1; got 0"),
        (["sync.quorum=two"], "sync.quorum must be of type int; got 'two'"),
        (["sync.merge_rule=median"], "must be one of rda, mean; got 'median'"),
        (
            ["run.learners=4", "sync.quorum=5", "run.max_steps=9"],
            "sync.quorum (K) must be at most run.learners (M = 4)",
        ),
        (["sync.interval=1:5"], "sync.interval must be"),
        (["sync.interval=1:0%,2:50%"], "needs run.max_steps or run.max_tokens"),
        (["quorum=2"], "must read section.key=value; got 'quorum=2'"),
        (["outer.lr=nan"], "outer.lr must be positive and finite"),
        (["timeouts.group_s=-1"], "timeouts.group_s must be positive"),
    ],
)
def test_train_bad_setting_is_one_sentence_and_status_2(words, says, capsys, monkeypatch) -> None:
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[sync]\nquorum = 'two'\n", "sync.quorum must be of type int"),
        (b"[sync\n", "must be TOML"),
        (b"quorum = 2\n", "must stand in a section"),
        (b"\xff\xfe", "must be TOML"),
    ],
)
def test_train_bad_file_is_one_sentence_and_status_2(content, says, tmp_path, capsys) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    assert main(["train", "--config", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_train_resume_without_a_run_is_status_2(tmp_path, capsys) -> None:
    assert main(["train", "--resume", str(tmp_path / "none")]) == 2
    assert "must be readable" in capsys.readouterr().err


def test_train_settings_after_options_are_taken(tmp_path, capsys) -> None:
    """`pyddl train --data X run.dir=Y` and `pyddl train run.dir=Y --data X` are both natural to type."""
    for words in (["--data", "x", "sync.quorum=0"], ["sync.quorum=0", "--data", "x"]):
        assert main(["train", *words]) == 2
        assert "sync.quorum must be at least 1" in capsys.readouterr().err


def test_inspect_folder_without_a_run_is_status_2(tmp_path, capsys) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "must hold events.jsonl" in capsys.readouterr().err


def test_export_missing_run_is_status_2(tmp_path, capsys) -> None:
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out.safetensors")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["0", "-3", "nan"])
def test_info_bad_number_of_parameters_is_status_2(word, capsys) -> None:
    assert main(["info", f"--parameters={word}"]) == 2
    assert "--parameters must be at least 1" in capsys.readouterr().err


def test_info_names_versions_mpi_and_kernels(capsys) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("pyddl", "torch", "MPI library", "kernels: cpu", "kernels: cuda", "a rank's death is survived"):
        assert word in out


def test_info_plan_of_7e9_parameters_gives_the_known_sizes() -> None:
    from pyddl.config import Config
    from pyddl.view.info import plan

    sizes = plan(Config(), 7_000_000_000, 8, 1.0)
    assert sizes["fragment_bytes"] == pytest.approx(7e9 * 4 / 24, rel=1e-6)  # 1.17 GB
    assert sizes["mailbox_bytes"] == pytest.approx(2 * 2 * 8 * 7e9 * 4 / 24, rel=1e-6)  # two slots each way, 8 learners


def test_guard_without_a_command_shows_its_usage(capfd) -> None:
    assert main(["guard"]) == 2
    assert "usage: pyddl guard" in capfd.readouterr().err


@pytest.mark.parametrize("content", [None, b"\0\1\2" * 5000])
def test_train_empty_or_binary_data_folder_is_status_2(content, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if content:
        (data / "image.bin").write_bytes(content)
    done = _pyddl("train", "--data", str(data), "run.max_steps=9", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(data) in done.stderr


def test_train_alone_warns_once_and_trains(tmp_path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    done = _pyddl("train", "--data", str(text), "run.max_steps=12", "lm.preset=tiny", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("alone in its MPI world") == 1


def test_train_singleton_under_a_launcher_of_many_tasks_is_refused(tmp_path) -> None:
    """A wrong --mpi= of srun gives singletons, each of which would train alone and exit with 0."""
    environment = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1"}
    done = _pyddl("train", "run.max_steps=12", folder=tmp_path, **environment)
    assert done.returncode == 2, done.stderr
    assert "started 4 tasks, and MPI sees a world of 1" in done.stderr
    assert "Traceback" not in done.stderr


def _pyddl(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyddl.cli", *words],
        cwd=folder,
        env={**CLEAN, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
