"""Resolving a configuration, agreeing on it, and opening a run's folder; with MPI: tests/mpi/test_mpi_session.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyddl
from pyddl.config import Config, OuterConfig, RunConfig, SyncConfig, load_config
from pyddl.core.layout import Layout, TensorSpec, build_layout
from pyddl.core.protocol import Protocol
from pyddl.errors import CheckpointError, ConfigError, LayoutMismatch, PyddlError, TransportError
from pyddl.run.hello import refusal, sections_of
from pyddl.run.serving import (
    _agree,
    _common_layout,
    _find_checkpoint,
    _open_folder,
    _require_something_to_do,
    _write_config,
)
from pyddl.run.session import _resolve
from pyddl.run.syncer import protocol_config
from pyddl.store.checkpoint import Checkpoint, FragmentState, write_checkpoint


def layout(size: int = 3) -> Layout:
    return build_layout([TensorSpec("w", (size,), "float32", "parameter")])


# ---------------------------------------------------------------- one configuration from several sources


def test_resolve_nothing_gives_the_defaults():
    assert _resolve(None, {}, {}) == Config()


def test_resolve_config_is_taken_as_it_is():
    config = Config(run=RunConfig(seed=3))
    assert _resolve(config, {}, {}) is config


def test_resolve_sections_come_on_top_of_a_file(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nseed = 4\nmax_steps = 50\n[sync]\nwire = "bf16"\ninterval = 10\n')
    for source in (path, str(path)):
        config = _resolve(source, {}, {"run": {"seed": 5}, "outer": {"optimizer": "nesterov", "lr": 1e-05}})
        assert (config.run.seed, config.run.max_steps, config.sync.wire, config.sync.interval) == (5, 50, "bf16", "10")
        assert (config.outer.optimizer, config.outer.lr, config.outer.momentum) == ("nesterov", 1e-05, 0.9)


def test_resolve_sections_come_on_top_of_a_config_and_change_nothing_else():
    config = Config(
        run=RunConfig(dir="a folder = of mine", seed=7, max_steps=30),
        sync=SyncConfig(interval="5", grace=False, gamma=0.1),
        outer=OuterConfig(lr=0.7),
    )
    wanted = dataclasses.replace(config, sync=dataclasses.replace(config.sync, wire="bf16"))
    assert _resolve(config, {}, {"sync": {"wire": "bf16"}}) == wanted


@pytest.mark.parametrize("as_file", [False, True])
def test_resolve_settings_are_checked_together_and_not_against_the_defaults(as_file: bool, tmp_path: Path):
    """A run of 10 steps is too short for the default H of 24, and resume needs a folder: both are in the base."""
    words = ["sync.interval=5", f"run.dir={tmp_path}"]
    source: Any = load_config(None, words)[0]
    if as_file:
        source = tmp_path / "c.toml"
        source.write_text(f'[sync]\ninterval = 5\n[run]\ndir = "{tmp_path}"\n')
    config = _resolve(source, {}, {"run": {"max_steps": 10, "resume": True}})
    assert (config.run.max_steps, config.run.resume, config.sync.interval) == (10, True, "5")
    with pytest.raises(ConfigError, match=r"sync\.interval must be at most run\.max_steps"):
        _resolve(source, {}, {"run": {"max_steps": 4}})


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"sync": {"quorm": 2}}, r"sync\.quorm.*did you mean sync\.quorum"),
        ({"snyc": {"quorum": 2}}, "section 'snyc'.*did you mean sync"),
        ({"sync": {"quorum": "many"}}, r"sync\.quorum must be of type int; got 'many'"),
        ({"sync": {"quorum": 0}}, r"sync\.quorum must be at least 1; got 0"),
        ({"run": {"resume": True}}, r"run\.dir must be set when run\.resume is"),
    ],
)
@pytest.mark.parametrize("base", [None, Config()])
def test_init_wrong_setting_is_refused_by_name_before_mpi_starts(base: Config | None, sections: Any, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        pyddl.init(base, **sections)


def test_init_something_that_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"takes a Config, the path of a TOML file or nothing; got \{'run': 1\}"):
        pyddl.init({"run": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no-such-file"):
        pyddl.init("no-such-file.toml")


def test_init_settings_that_stand_in_no_section_are_refused():
    with pytest.raises(ConfigError, match=r"settings by section, such as run=.*; got max_steps=5"):
        pyddl.init(max_steps=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", [{"lr": 0.1}, OuterConfig])
def test_init_task_that_is_no_instance_of_a_dataclass_is_refused(section: Any):
    with pytest.raises(ConfigError, match=r"instances of a dataclass, .*; got lm="):
        pyddl.init(task={"lm": section})


def test_init_file_with_the_section_of_a_task_says_who_reads_it(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmax_steps = 5\n[lm]\nlr = 0.1\n")
    with pytest.raises(ConfigError, match=r"run\.toml has \[lm\], which is for pyddl train; .*take the section out"):
        pyddl.init(path)


# ---------------------------------------------------------------- agreeing


def hello(config: Config, model: Layout | None = None) -> dict[str, Any]:
    """As it comes over the wire."""
    made = {"config": sections_of(config), "layout": (model or layout()).to_json(), "processes": [], "task": ""}
    received: dict[str, Any] = json.loads(json.dumps(made))
    return received


def test_agree_on_equal_configurations_gives_that_one():
    config = load_config(None, ["run.seed=3", "outer.lr=0.1", "sync.interval=8:0,24:100", "timeouts.stall_s=2.5"])[0]
    assert _agree(config, [hello(config)] * 3) == config
    assert _agree(None, [hello(config)] * 3) == config, "a syncer that was told nothing"


def test_agree_on_different_ones_names_setting_values_and_learner():
    one, two = Config(run=RunConfig(seed=1)), Config(run=RunConfig(seed=2))
    with pytest.raises(ConfigError, match=r"run\.seed is 1 at the syncer and 2 at learner 1"):
        _agree(one, [hello(one), hello(two)])
    with pytest.raises(ConfigError, match=r"run\.seed is 1 at the first learner and 2 at learner 2"):
        _agree(None, [hello(one), hello(one), hello(two)])


def test_agree_with_a_learner_of_another_version_names_what_it_lacks():
    old = hello(Config())
    del old["config"]["sync"]["tau_steps"]
    with pytest.raises(ConfigError, match=r"sync\.tau_steps is 2 at the syncer and None at learner 0"):
        _agree(Config(), [old])


def test_common_layout_of_different_models_shows_the_difference():
    config = Config()
    assert _common_layout([hello(config), hello(config)]) == layout()
    with pytest.raises(LayoutMismatch, match=r"learner 1 differs from learner 0:\nchanged: w: shape \(3,\) required"):
        _common_layout([hello(config), hello(config, layout(4))])


@pytest.mark.parametrize("kind", [ConfigError, LayoutMismatch, CheckpointError, TransportError])
def test_refusal_arrives_as_the_error_that_the_syncer_had(kind: type[PyddlError]):
    error = refusal({"error": "what is wrong", "kind": kind.__name__})
    assert type(error) is kind
    assert str(error) == "what is wrong"


def test_refusal_of_a_kind_that_is_not_known_is_still_an_error_of_pyddl():
    assert type(refusal({"error": "x", "kind": "Exotic"})) is PyddlError


# ---------------------------------------------------------------- the folder


def write_run(folder: Path, model: Layout, config: Config, meta: dict[str, Any] | None = None) -> None:
    protocol = Protocol(protocol_config(config, model, 1))
    fragments = tuple(
        FragmentState(
            0, np.zeros(f.num_elements, dtype=np.float32), None, np.zeros(f.num_counters, dtype=np.int64)
        )
        for f in model.fragments
    )  # fmt: skip
    checkpoint = Checkpoint(5, model, fragments, protocol.snapshot(), "", meta or {})
    write_checkpoint(folder, checkpoint, keep=2)


def test_folder_is_made_locked_and_has_the_configuration(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}/deep/run", "run.seed=9"])[0]
    folder, lock = _open_folder(config)
    assert folder == tmp_path / "deep" / "run"
    _write_config(folder, config, "")
    assert load_config(folder / "config.toml")[0] == config
    with pytest.raises(PyddlError):
        _open_folder(config)
    lock.release()
    _, lock = _open_folder(config)
    lock.release()


def test_folder_is_not_needed():
    assert _open_folder(Config()) == (None, None)


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    config = load_config(None, [f"run.dir={tmp_path}/file/run"])[0]
    with pytest.raises(ConfigError, match="must be a folder that can be made"):
        _open_folder(config)


def test_folder_with_a_run_is_refused_unless_it_is_resumed_and_is_free_again(tmp_path: Path):
    fresh = load_config(None, [f"run.dir={tmp_path}"])[0]
    write_run(tmp_path, layout(), fresh)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"holds checkpoints: resume it \(run\.resume=true\) or choose another"):
            _open_folder(fresh)
    again = load_config(None, [f"run.dir={tmp_path}", "run.resume=true"])[0]
    folder, lock = _open_folder(again)
    checkpoint, _path, sentences = _find_checkpoint(again, folder, layout(), {})
    lock.release()
    assert checkpoint.step == 5
    assert sentences[-1].startswith("resuming at step 5 from checkpoint-")


def test_folder_with_the_tape_of_a_run_without_a_checkpoint_is_refused_and_free_again(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}"])[0]
    (tmp_path / "events.jsonl").write_text('{"kind":"run_opened"}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"holds one that ended before its first checkpoint: remove that folder"):
            _open_folder(config)


def test_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}", "run.resume=true"])[0]
    write_run(tmp_path, layout(), config)
    with pytest.raises(
        LayoutMismatch, match=r"must be that of the run in .*\nchanged: w: shape \(3,\) required, \(4,\)"
    ):
        _find_checkpoint(config, tmp_path, layout(4), {})


def with_frozen() -> Layout:
    specs = [TensorSpec("w", (3,), "float32", "parameter")]
    return build_layout([*specs, *(TensorSpec(name, (2,), "float32", "frozen") for name in ("base", "head"))])


def test_checkpoint_trained_on_other_frozen_tensors_is_refused_by_name(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}", "run.resume=true"])[0]
    frozen = {"base": 0xFFFFFFFF, "head": 7}
    write_run(tmp_path, with_frozen(), config, {"frozen": frozen})
    assert _find_checkpoint(config, tmp_path, with_frozen(), dict(frozen))[0].step == 5
    with pytest.raises(LayoutMismatch, match=r"; head differ from those of .*/checkpoint-0000000005\.h5: load"):
        _find_checkpoint(config, tmp_path, with_frozen(), {**frozen, "head": 8})


def test_checkpoint_is_not_looked_for_unless_asked(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}"])[0]
    assert _find_checkpoint(config, tmp_path, layout(), {}) == (None, None, [])


def test_checkpoint_that_is_missing_is_an_error_on_resume(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}", "run.resume=true"])[0]
    with pytest.raises(CheckpointError):
        _find_checkpoint(config, tmp_path, layout(), {})


def test_resume_of_a_run_that_is_at_its_end_is_refused():
    """It would make a step, write a checkpoint and push good ones out."""
    config = load_config(None, ["run.max_steps=100"])[0]
    with pytest.raises(ConfigError, match=r"at its end already: run.max_steps is 100 and it stands at 100; raise it"):
        _require_something_to_do(config, {"step": 100, "ledgers": {}})
    _require_something_to_do(config, {"step": 99, "ledgers": {}})
    config = load_config(None, ["run.max_tokens=50"])[0]
    with pytest.raises(ConfigError, match=r"run.max_tokens is 50 and it stands at 60"):
        _require_something_to_do(config, {"step": 5, "ledgers": {"0": {"processed": 20}, "1": {"processed": 40}}})
