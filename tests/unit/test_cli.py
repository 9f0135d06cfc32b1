"""The command line: mistakes get one sentence and exit status 2, never a traceback."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyddl.cli import main
from pyddl.config import load_config
from pyddl.run import guard
from pyddl.store.trace import Trace

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
        ([], "the run must have an end; neither run.max_steps nor run.max_tokens is set"),
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


def test_train_settings_before_after_and_between_options_are_taken(tmp_path, capsys) -> None:
    """`pyddl train --data X run.dir=Y` and `pyddl train run.dir=Y --data X` are both natural to type."""
    for words in (
        ["--data", "x", "sync.quorum=0"],
        ["sync.quorum=0", "--data", "x"],
        ["sync.quorum=2", "--data", "x", "sync.quorum=0"],
        ["sync.quorum=2", "--data", "x", "--", "sync.quorum=0"],
    ):
        assert main(["train", *words]) == 2
        assert "sync.quorum must be at least 1" in capsys.readouterr().err


def test_script_with_a_mistake_ends_with_its_sentence_and_status_2() -> None:
    text = 'import pyddl; pyddl.init(sync={"quorm": 2})'
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=CLEAN, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("pyddl: unknown setting sync.quorm"), done.stderr
    assert done.stderr.count("\n") == 1


def test_inspect_folder_without_a_run_is_status_2(tmp_path, capsys) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "must hold events.jsonl" in capsys.readouterr().err


def test_inspect_tells_what_each_learner_really_did(tmp_path, capsys) -> None:
    with Trace(tmp_path / "events.jsonl") as tape:
        seen = {"step": 12, "num_steps": 9, "tokens": 4096, "loss": 1.25, "max_gap_s": 0.1}
        tape.write("Sample", step=12, learners={0: seen, 1: {**seen, "num_steps": 5, "loss": math.nan}})
        tape.write("LearnerLost", learner_id=1, reason="the process of its rank 0 ended")
        tape.write("Publish", merged=[0, 1])
        tape.write("Publish", merged=[0])
        tape.write("Sample", step=14, learners={0: {**seen, "num_steps": 11, "tokens": 5000}})
        tape.write("Result", outcome="drained", ended_by="max_steps = 14", achieved_H=2.66666, rejected={}, tokens={})
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    learners = json.loads(capsys.readouterr().out)["learners"]
    assert learners["0"] == {"num_steps": 11, "tokens": 5000, "loss": 1.25, "participation": 1.0}
    assert (learners["1"]["num_steps"], learners["1"]["participation"]) == (5, 0.5)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "11 steps, 5,000 tokens, loss 1.25, in 100 % of the merges" in shown
    assert "5 steps, 4,096 tokens, loss not known, in 50 % of the merges" in shown
    assert re.search(r"achieved_H +2\.67\b", shown)


def test_train_resumed_run_in_another_folder_is_status_2(tmp_path, capsys) -> None:
    assert main(["train", "--resume", str(tmp_path / "a"), f"run.dir={tmp_path / 'b'}"]) == 2
    assert f"resumed in its own folder, {tmp_path / 'a'}; got run.dir=" in capsys.readouterr().err


def test_export_missing_run_is_status_2(tmp_path, capsys) -> None:
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out.safetensors")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["0", "-3", "nan", "inf", "1e16"])
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["zzz"], "unknown command 'zzz'; known: export, guard, info, inspect, settings, syncer, train"),
        (["run.max_steps=5"], "unknown command 'run.max_steps=5'; known: "),
        (["--vresion"], "unknown option --vresion; did you mean --version?"),
        (["train", "--rezume", "X"], "unknown option --rezume; did you mean --resume? (see pyddl train --help)"),
        (["train", "--rezume=X"], "unknown option --rezume; did you mean --resume?"),
        (["train", "run.max_steps=5", "-resume", "X"], "unknown option -resume; did you mean --resume?"),
        (["inspect", "RUN", "--jsno"], "unknown option --jsno; did you mean --json?"),
        (["inspect", "--jsno"], "unknown option --jsno; did you mean --json?"),
        (["export", "RUN", "FILE", "--zzz"], "unknown option --zzz; known: --help, -h"),
        (["inspect", "RUN", "again"], "unrecognized arguments: again (see pyddl inspect --help)"),
        (["train", "--resume"], "argument --resume: expected one argument"),
        (["info", "--learners", "two"], "argument --learners: invalid int value: 'two'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_word_is_one_sentence_with_the_nearest_right_one_and_status_2(words, says, capsys) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pyddl: {says}")
    assert error.count("\n") == 1


def test_wrong_word_is_shown_by_the_first_rank_alone(tmp_path) -> None:
    for rank, lines in ((0, 1), (1, 0)):
        done = _pyddl("trian", folder=tmp_path, PMI_RANK=str(rank), PMI_SIZE="2")
        assert (done.returncode, done.stderr.count("\n")) == (2, lines)


def test_option_may_be_abbreviated_and_a_negative_number_is_no_option(tmp_path, capsys) -> None:
    assert main(["train", "--res", str(tmp_path / "none")]) == 2
    assert "must be readable" in capsys.readouterr().err
    assert main(["info", "--parameters", "-3"]) == 2
    assert "--parameters must be at least 1 and at most 1e15; got -3" in capsys.readouterr().err
    assert main(["inspect", "--", "--jsno"]) == 2
    assert "--jsno does not" in capsys.readouterr().err


def test_settings_of_the_language_model_are_those_of_a_run_without_a_file(tmp_path, capsys) -> None:
    """A file made of them, unchanged, must not undo what pyddl train sets for its model."""
    from pyddl.tasks.lm import RECOMMENDED, LMConfig

    assert main(["settings", "--lm"]) == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    words, sections = ["run.max_steps=1000"], {"lm": LMConfig}
    resolved = load_config(file, words, sections=sections, defaults=RECOMMENDED)
    assert resolved == load_config(None, words, sections=sections, defaults=RECOMMENDED)
    assert resolved[0].sync.interval in RECOMMENDED[0]


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


def _interrupted(command: list[str], line: str, **environment: str) -> tuple[int, str]:
    """Exit status and further errors of a process that gets SIGINT when it has shown a line."""
    process = subprocess.Popen(
        command,
        env={**CLEAN, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        assert process.stderr is not None
        while line not in (said := process.stderr.readline()):
            assert said, f"it ended with {process.wait()} before it said {line!r}"
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, rest


def test_train_interrupted_while_it_imports_ends_with_130_and_says_nothing(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("import sys, time\nprint('importing', file=sys.stderr)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "pyddl.cli", "train", "run.max_steps=5"]
    assert _interrupted(command, "importing", PYTHONPATH=str(tmp_path)) == (130, "")


def test_train_interrupted_alone_ends_with_130_and_says_nothing(tmp_path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    command = [sys.executable, "-m", "pyddl.cli", "train", "--data", str(tmp_path), "lm.preset=tiny", "sync.interval=4"]
    assert _interrupted(command, "alone in its MPI world") == (130, "")


def test_guard_interrupted_before_it_guards_ends_with_130(monkeypatch, capfd) -> None:
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyddl.run.guard.run", interrupted)
    assert guard.main(["sleep", "60"]) == 130
    assert capfd.readouterr().err == ""


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
