"""config.py: defaults, TOML, words of the command line, ranges."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyddl.config
from pyddl.config import (
    Config,
    OuterConfig,
    RunConfig,
    SyncConfig,
    TimeoutConfig,
    load_config,
    to_toml,
)
from pyddl.errors import ConfigError, PyddlError


@dataclass(frozen=True)
class Task:
    """A section such as a task brings."""

    text: str = "words"
    lr: float = 0.1
    layers: int = 2
    tied: bool = True
    limit: int | None = None
    name: str | None = "x"


def write(tmp_path, text: str):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sections_of(config: Config) -> dict[str, object]:
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}


# ---------------------------------------------------------------- precedence


def test_load_config_nothing_given_is_the_paper_defaults() -> None:
    config, others = load_config()
    assert config == Config()
    assert others == {}
    assert (config.sync.quorum, config.sync.tau_steps, config.interval.at(0)) == (1, 2, 24)


def test_load_config_file_overrides_defaults_and_words_override_the_file(tmp_path) -> None:
    path = write(tmp_path, '[sync]\nquorum = 2\ntau_steps = 5\n[outer]\noptimizer = "nesterov"\nlr = 1\n')
    config, _ = load_config(path, ["sync.quorum=3", "sync.quorum = 4", "timeouts.stall_s=2"])
    assert (config.sync.quorum, config.sync.tau_steps) == (4, 5)
    assert config.outer == OuterConfig("nesterov", 1.0, 0.9)
    assert isinstance(config.outer.lr, float)
    assert config.timeouts.stall_s == 2.0


def test_load_config_sections_of_a_task_are_built_beside(tmp_path) -> None:
    path = write(tmp_path, '[task]\ntext = "in = file"\nlayers = 8\n')
    config, others = load_config(path, ["task.tied=false", "task.limit=7"], sections={"task": Task})
    assert config == Config()
    assert others == {"task": Task("in = file", 0.1, 8, False, 7, "x")}


def test_load_config_value_may_hold_equals_and_dots() -> None:
    _, others = load_config(None, ["task.text=a.b=c"], sections={"task": Task})
    assert others["task"].text == "a.b=c"


# ---------------------------------------------------------------- words that are wrong


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("quorum=2", r"must read section\.key=value; got 'quorum=2'"),
        ("sync.quorum", r"must read section\.key=value"),
        ("synk.quorum=2", r"unknown section 'synk' in the command line; did you mean sync\?"),
        ("sync.qorum=2", r"unknown setting sync\.qorum in the command line; did you mean sync\.quorum\?"),
        ("sync.=2", r"unknown setting sync\."),
        ("zzz.k=2", "known: outer, run, sync, timeouts"),
        ("lm.lr=1", r"one of outer, run, sync, timeouts here; the command line has \[lm\], which is for pyddl train"),
        ("sync.quorum=two", r"sync\.quorum must be of type int; got 'two'"),
        ("sync.quorum=2.0", r"sync\.quorum must be of type int"),
        ("sync.grace=1", r"sync\.grace must be of type bool; got '1'"),
        ("outer.lr=fast", r"outer\.lr must be of type float"),
        ("outer.optimizer=nestorov", "did you mean 'nesterov'"),
        ("run.backend=tpu", r"run\.backend must be one of auto, cpu, reference; got 'tpu'"),
    ],
)
def test_load_config_wrong_word_is_named_with_the_nearest_right_one(word, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [word])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quorum = 2\n", "'quorum' stands alone"),
        ("[sync\n", "must be TOML"),
        ("[sync]\nquorum = true\n", r"sync\.quorum must be of type int; got True"),
        ("[sync]\nquorum = 2.0\n", r"sync\.quorum must be of type int; got 2\.0"),
        ("[sync]\ngrace = 1\n", r"sync\.grace must be of type bool; got 1"),
        ("[sync]\nwire = true\n", r"sync\.wire must be of type str; got True"),
        ("[sync]\ninterval = 2.5\n", r"sync\.interval must be of type str"),
        ("[outer]\nlr = false\n", r"outer\.lr must be of type float"),
        ("[sync]\nqourum = 2\n", r"unknown setting sync\.qourum in .*run\.toml; did you mean sync\.quorum"),
        ("[sync.deep]\nx = 1\n", r"unknown setting sync\.deep"),
    ],
)
def test_load_config_wrong_file_is_refused(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_load_config_section_of_a_task_is_told_from_a_misspelt_one(tmp_path) -> None:
    """As `pyddl settings --lm > run.toml` writes it."""
    path = write(tmp_path, "[lm]\nlr = 1\n")
    with pytest.raises(ConfigError, match=r"run\.toml has \[lm\].*start that.*load_config\(FILE, sections={'lm'"):
        load_config(path)
    _, others = load_config(path, sections={"lm": Task})
    assert others["lm"].lr == 1.0


def test_load_config_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"must be readable; .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b'[run]\ndir = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml must be TOML"):
        load_config(tmp_path / "latin.toml")


def test_load_config_number_where_text_is_wanted_is_taken(tmp_path) -> None:
    config, _ = load_config(write(tmp_path, "[sync]\ninterval = 12\n"))
    assert config.interval.at(0) == 12


def test_load_config_word_with_digit_groups_is_a_number() -> None:
    config, _ = load_config(None, ["run.max_tokens=1_000_000"])
    assert config.run.max_tokens == 1_000_000


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (RunConfig, "learners", [0, 16], [-1]),
        (RunConfig, "ranks", [1, 8], [0, -1]),
        (RunConfig, "max_steps", [0, 5], [-1]),
        (RunConfig, "max_tokens", [0, 5], [-1]),
        (RunConfig, "seed", [0, 1 << 62], [-1]),
        (RunConfig, "checkpoint_every_merges", [0, 3], [-1]),
        (RunConfig, "checkpoint_every_s", [0.0, 0.5], [-1.0, math.nan, math.inf]),
        (RunConfig, "keep_checkpoints", [2, 9], [1, 0]),
        (RunConfig, "backend", ["auto", "cpu", "reference"], ["", "CPU"]),
        (SyncConfig, "quorum", [1, 16], [0]),
        (SyncConfig, "num_fragments", [0, 1, 65535], [-1, 65536]),
        (SyncConfig, "fragmentation", ["balanced", "layer", "tensor"], ["even"]),
        (SyncConfig, "tau_steps", [1, 4], [0]),
        (SyncConfig, "in_flight", [0, 2, 64], [-1, 65]),
        (SyncConfig, "gamma", [0.0, 0.99], [1.0, -0.1, math.nan, math.inf]),
        (SyncConfig, "merge_rule", ["rda", "mean"], ["sum"]),
        (SyncConfig, "receipt", ["replace", "rebase"], ["blend"]),
        (SyncConfig, "wire", ["f32", "bf16"], ["int4"]),
        (SyncConfig, "lockstep_steps", [0, 9], [-1]),
        (OuterConfig, "optimizer", ["sgd", "nesterov"], ["adam"]),
        (OuterConfig, "lr", [1e-9, 2.0], [0.0, -1.0, math.nan, math.inf]),
        (OuterConfig, "momentum", [0.0, 0.999], [1.0, -0.1, math.nan]),
        *(
            (TimeoutConfig, item.name, [0.001, 1e6], [0.0, -1.0, math.nan, math.inf, 1e10])
            for item in dataclasses.fields(TimeoutConfig)
        ),
    ],
)
def test_section_value_out_of_range_is_refused_by_name(section, name, good, bad) -> None:
    for value in good:
        assert getattr(section(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=rf"\.{name} must be .*; got "):
            section(**{name: value})


def test_run_config_resume_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir must be set when run\.resume is"):
        RunConfig(resume=True)
    assert RunConfig(dir="runs/a", resume=True).resume


def test_config_quorum_larger_than_the_number_of_learners_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most run\.learners \(M = 2\).*got 3"):
        Config(run=RunConfig(learners=2), sync=SyncConfig(quorum=3))
    Config(run=RunConfig(learners=3), sync=SyncConfig(quorum=3))
    Config(run=RunConfig(learners=0), sync=SyncConfig(quorum=3))  # M is not known yet


def test_config_interval_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.interval must be at most run\.max_steps \(10\)"):
        Config(run=RunConfig(max_steps=10), sync=SyncConfig(interval="11"))
    Config(run=RunConfig(max_steps=10), sync=SyncConfig(interval="10"))
    Config(run=RunConfig(max_steps=10), sync=SyncConfig(interval="2:0,24:5"))


def test_config_malformed_interval_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"sync\.interval must be"):
        Config(sync=SyncConfig(interval="often"))
    with pytest.raises(ConfigError, match=r"needs run\.max_steps"):
        Config(sync=SyncConfig(interval="1:0%,24:50%"))


def test_config_interval_in_shares_follows_max_steps() -> None:
    config = Config(run=RunConfig(max_steps=100), sync=SyncConfig(interval="1:0%,24:50%"))
    assert (config.interval.at(49), config.interval.at(50)) == (1, 24)


SHARES = ["sync.interval=2:0%,4:60%"]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("setting", "interval"),
    [("run.max_steps=100", "2:0%,4:60%"), ("run.max_tokens=100", "2:0%,4:60%"), ("sync.interval=24", "24")],
)
def test_load_config_below_a_task_default_in_shares_an_end_or_an_interval_is_enough(
    tmp_path, setting, interval, in_file
) -> None:
    section, _, rest = setting.partition(".")
    path = write(tmp_path, f"[{section}]\n{rest}\n" if in_file else "")
    config, _ = load_config(path, [] if in_file else [setting], defaults=SHARES)
    assert config.sync.interval == interval


def test_load_config_run_without_an_end_below_a_task_default_in_shares_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"^the run must have an end; .*set run\.max_steps=1000.*or run\.max_tokens="):
        load_config(None, [], defaults=SHARES)
    with pytest.raises(ConfigError, match=r"a percentage in sync\.interval \('1:0%'\) needs"):
        load_config(None, ["sync.interval=1:0%"], defaults=SHARES)
    with pytest.raises(ConfigError, match=r"sync\.quorum must be"):
        load_config(None, ["sync.quorum=0"], defaults=SHARES)


def test_config_error_is_a_value_error_and_ends_with_status_2() -> None:
    with pytest.raises(ValueError, match="quorum") as caught:
        SyncConfig(quorum=0)
    assert isinstance(caught.value, PyddlError)
    assert caught.value.exit_status == 2


def test_config_attributes_are_all_documented() -> None:
    for section in (RunConfig, SyncConfig, OuterConfig, TimeoutConfig):
        for item in dataclasses.fields(section):
            assert f"        {item.name}: " in (section.__doc__ or ""), (section, item.name)


# ---------------------------------------------------------------- writing


def test_to_toml_defaults_read_back_equal(tmp_path) -> None:
    assert load_config(write(tmp_path, to_toml(sections_of(Config()))))[0] == Config()


def test_to_toml_changed_sections_read_back_equal(tmp_path) -> None:
    config = Config(
        run=RunConfig(dir='a "b" \\ c\n\td', learners=4, max_steps=500, max_tokens=1 << 60),
        sync=SyncConfig(quorum=3, interval="1:0%,24:50%", gamma=0.123456789012345678, grace=False, wire="bf16"),
        outer=OuterConfig("nesterov", 1e-30, 0.0),
        timeouts=TimeoutConfig(heartbeat_s=1234.56789012345),
    )
    task = Task("é", 1e-5, 1, False, None, None)
    path = write(tmp_path, to_toml({**sections_of(config), "task": task}))
    assert load_config(path, sections={"task": Task}) == (config, {"task": task})


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "none"),
    st.floats(allow_nan=False),
    st.integers(),
    st.booleans(),
    st.none() | st.integers(),
)
def test_to_toml_any_values_read_back_equal(tmp_path_factory, text, lr, layers, tied, limit) -> None:
    task = Task(text, lr, layers, tied, limit, text)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(to_toml({"task": task}).encode("utf-8"))
    assert load_config(path, sections={"task": Task})[1]["task"] == task


def test_config_all_names_exist() -> None:
    assert all(hasattr(pyddl.config, name) for name in pyddl.config.__all__)
