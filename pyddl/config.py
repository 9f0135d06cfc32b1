"""Every setting of a run, its default, its unit and its range.

Here: frozen dataclasses, reading them from TOML and ``section.key=value`` words, all range checks.
Not here: settings of a task (tasks/ brings its own sections and passes them to :func:`load_config`).
Precedence: default < file < command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .core.schedule import IntervalSchedule
from .errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Config",
    "OuterConfig",
    "RunConfig",
    "SyncConfig",
    "TimeoutConfig",
    "load_config",
    "to_toml",
]


_LONGEST_S = 1e7  # of a timeout, some months: what threads and timers can still count
_SECTIONS_OF_TASKS = {"lm": "pyddl train"}  # what pyddl itself writes into files: no misspelt words


def require(condition: bool, name: str, wanted: str, got: object) -> None:
    """Raise ConfigError unless ``condition`` holds: what was required of ``name``, what came."""
    if not condition:
        raise ConfigError(f"{name} must be {wanted}; got {got!r}")


def require_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest allowed word, unless ``value`` is one of ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{hint}")


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole.

    Attributes:
        dir: folder of the run; created. Empty: nothing is written to disk.
        learners: M, number of learners; 0: as many as the world holds.
        ranks: G, ranks per learner, >= 1.
        max_steps: the clock step at which the run ends; 0: no limit by steps.
        max_tokens: tokens, summed over all learners, at which the run ends; 0: no limit by tokens.
        seed: of data order and whatever the task draws, >= 0.
        checkpoint_every_merges: a checkpoint after every so many merges; 0: not by merges.
        checkpoint_every_s: a checkpoint also with the first merge so many seconds after one was due; 0: not by time.
            The end of the run always writes one.
        keep_checkpoints: newest checkpoints kept, >= 2 so that a damaged one has a predecessor.
        resume: go on from the newest good checkpoint in ``dir``.
        backend: merge kernels: auto, cpu (C++), or reference (numpy).
    """

    dir: str = ""
    learners: int = 0
    ranks: int = 1
    max_steps: int = 0
    max_tokens: int = 0
    seed: int = 0
    checkpoint_every_merges: int = 1000
    checkpoint_every_s: float = 300.0
    keep_checkpoints: int = 2
    resume: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        require(self.learners >= 0, "run.learners", "0 (as many as the world holds) or more", self.learners)
        require(self.ranks >= 1, "run.ranks", "at least 1", self.ranks)
        require(self.max_steps >= 0, "run.max_steps", "0 (no limit) or more", self.max_steps)
        require(self.max_tokens >= 0, "run.max_tokens", "0 (no limit) or more", self.max_tokens)
        require(self.seed >= 0, "run.seed", "0 or more", self.seed)
        require(
            self.checkpoint_every_merges >= 0,
            "run.checkpoint_every_merges",
            "0 or more",
            self.checkpoint_every_merges,
        )
        require(
            0 <= self.checkpoint_every_s < math.inf,
            "run.checkpoint_every_s",
            "0 (not by time) or a number of seconds",
            self.checkpoint_every_s,
        )
        require(self.keep_checkpoints >= 2, "run.keep_checkpoints", "at least 2", self.keep_checkpoints)
        require_one_of("run.backend", self.backend, ("auto", "cpu", "reference"))
        require(not (self.resume and not self.dir), "run.dir", "set when run.resume is", self.dir)


@dataclass(frozen=True)
class SyncConfig:
    """How learners and syncer work together (paper: learner, syncer, fragments).

    Attributes:
        quorum: K, learners that must have announced before a merge, 1..M.
        interval: H, steps between two rounds of one fragment: a number, or a schedule H:from_step such
            as "1:0,2:200,24:2000", or in shares of the run "2:0%,4:60%".
        num_fragments: P; 0: min(24, number of tensors).
        fragmentation: balanced (paper's best), layer, or tensor.
        tau_steps: steps within which a merged fragment should land, >= 1.
        in_flight: rounds open at once, of distinct fragments; 0: what H asks for, ceil(P * tau / H), >= 2.
        gamma: share of the slack that the grace window may use, 0 <= gamma < 1 (eq. 3).
        grace: False: merge as soon as the quorum is met.
        merge_rule: rda or mean; embedding-like tensors are always merged by mean.
        receipt: replace (paper), or rebase (keep what was learnt since the push).
        wire: f32 or bf16, the format of outer gradients and parameters in the mailboxes.
        overlap_snapshots: copy what is pushed beside the next step, at the latest when the attached optimizer's step()
            begins; False if anything else changes parameters between learner.step() and that.
        lockstep_steps: until this clock step learners WAIT for what they pushed (gives up decoupling).
    """

    quorum: int = 1
    interval: str = "24"
    num_fragments: int = 0
    fragmentation: str = "balanced"
    tau_steps: int = 2
    in_flight: int = 0
    gamma: float = 0.9
    grace: bool = True
    merge_rule: str = "rda"
    receipt: str = "replace"
    wire: str = "f32"
    overlap_snapshots: bool = True
    lockstep_steps: int = 0

    def __post_init__(self) -> None:
        require(self.quorum >= 1, "sync.quorum", "at least 1", self.quorum)
        require(
            0 <= self.num_fragments < 1 << 16,
            "sync.num_fragments",
            "0 (chosen by size) to 65535",
            self.num_fragments,
        )
        require_one_of("sync.fragmentation", self.fragmentation, ("balanced", "layer", "tensor"))
        require(self.tau_steps >= 1, "sync.tau_steps", "at least 1", self.tau_steps)
        require(0 <= self.in_flight <= 64, "sync.in_flight", "0 (what H asks for) to 64", self.in_flight)
        require(0 <= self.gamma < 1, "sync.gamma", "at least 0 and below 1", self.gamma)
        require_one_of("sync.merge_rule", self.merge_rule, ("rda", "mean"))
        require_one_of("sync.receipt", self.receipt, ("replace", "rebase"))
        require_one_of("sync.wire", self.wire, ("f32", "bf16"))
        require(self.lockstep_steps >= 0, "sync.lockstep_steps", "0 or more", self.lockstep_steps)


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer. The paper does not publish its settings; the defaults are ours (docs/results.md).

    Attributes:
        optimizer: sgd (no momentum) or nesterov.
        lr: outer learning rate, > 0. DiLoCo's lineage uses 0.7 with Nesterov 0.9.
        momentum: 0 <= momentum < 1; used by nesterov only.
    """

    optimizer: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_one_of("outer.optimizer", self.optimizer, ("sgd", "nesterov"))
        require(math.isfinite(self.lr) and self.lr > 0, "outer.lr", "positive and finite", self.lr)
        require(0 <= self.momentum < 1, "outer.momentum", "at least 0 and below 1", self.momentum)


@dataclass(frozen=True)
class TimeoutConfig:
    """Deadlines, all in seconds, above 0 and up to 1e7. No wait in pyddl is without one.

    Attributes:
        setup_s: from start until every rank has attached.
        heartbeat_s: a learner that does not beat for so long is silent: not waited for until it beats again.
        group_s: a rank waits so long for the other ranks of its learner, then ends itself.
        syncer_s: a learner that has not heard the syncer for so long saves its state and exits with 75.
        drain_s: at the end, so long for the last rounds.
        stall_s: a transfer that does not move for so long marks the link as stalled.
        save_s: at the end, so long for the last checkpoint, and for a learner's state, to reach the disk.
    """

    setup_s: float = 120.0
    heartbeat_s: float = 10.0
    group_s: float = 60.0
    syncer_s: float = 300.0
    drain_s: float = 30.0
    stall_s: float = 5.0
    save_s: float = 600.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            wanted = f"positive and at most {_LONGEST_S:.0e} s"
            require(0 < value <= _LONGEST_S, f"timeouts.{item.name}", wanted, value)


@dataclass(frozen=True)
class Config:
    """All sections of a run; ``config.interval`` is the parsed schedule of H."""

    run: RunConfig = field(default_factory=RunConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        schedule = self.interval  # parses, so that a bad schedule fails here
        if self.run.learners and self.sync.quorum > self.run.learners:
            raise ConfigError(
                f"sync.quorum (K) must be at most run.learners (M = {self.run.learners}), or no merge could "
                f"ever happen; got {self.sync.quorum}"
            )
        require(
            schedule.shortest_steps <= (self.run.max_steps or sys.maxsize),
            "sync.interval",
            f"at most run.max_steps ({self.run.max_steps}) somewhere, or nothing is ever merged",
            self.sync.interval,
        )

    @property
    def interval(self) -> IntervalSchedule:
        """The schedule of H."""
        return IntervalSchedule.parse(
            self.sync.interval, max_steps=self.run.max_steps or None, max_tokens=self.run.max_tokens or None
        )


def load_config(
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    sections: Mapping[str, type] | None = None,
    defaults: Iterable[str] = (),
    origin: str = "the command line",
) -> tuple[Config, dict[str, Any]]:
    """Read a configuration: defaults, then a TOML file, then ``section.key=value`` words.

    Args:
        file: a TOML file, or None.
        overrides: words such as ``sync.quorum=2``; later ones win.
        sections: further sections (name -> frozen dataclass) that a task brings.
        defaults: words that stand in for the built-in defaults, below the file.
        origin: where the words come from, for the error messages.

    Returns:
        The :class:`Config`, and an instance for each of ``sections`` by name.

    Raises:
        ConfigError: for an unknown section or key (the nearest known one is named), a wrong type, a bad
            value, or a run without an end where ``defaults`` have a schedule in shares of the run.
    """
    types_by_section: dict[str, type] = {f.name: _section_type(Config, f.name) for f in dataclasses.fields(Config)}
    types_by_section.update(sections or {})
    below: dict[str, dict[str, Any]] = {name: {} for name in types_by_section}
    given: dict[str, dict[str, Any]] = {name: {} for name in types_by_section}
    _merge_words(below, defaults, types_by_section, origin="the task's defaults")
    if file is not None:
        _merge_file(given, Path(file), types_by_section)
    _merge_words(given, overrides, types_by_section, origin=origin)
    built = {name: types_by_section[name](**{**below[name], **given[name]}) for name in types_by_section}
    if "interval" not in given["sync"]:
        _require_an_end(built["run"], below["sync"].get("interval", ""))
    own = {f.name: built.pop(f.name) for f in dataclasses.fields(Config)}
    return Config(**own), built


def _require_an_end(run: RunConfig, interval: str) -> None:
    """Refuse a run without an end if a task's own schedule needs one: the user has written no percentage."""
    if "%" in interval and not (run.max_steps or run.max_tokens):
        raise ConfigError(
            "the run must have an end; neither run.max_steps nor run.max_tokens is set; set run.max_steps=1000, say, "
            "or run.max_tokens=10_000_000 (without an end only with a sync.interval of your own, such as 4: the "
            f"default here, {interval}, is in shares of the run)"
        )


def _merge_words(
    values: dict[str, dict[str, Any]], words: Iterable[str], types_by_section: dict[str, type], origin: str
) -> None:
    for word in words:
        key, equals, text = word.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"a setting in {origin} must read section.key=value; got {word!r}")
        _put(values, types_by_section, section, name, text.strip(), origin=origin)


def to_toml(sections: Mapping[str, Any]) -> str:
    """Write dataclass sections as TOML text that :func:`load_config` reads back to equal values."""
    lines: list[str] = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        for item in dataclasses.fields(section):
            lines.append(f"{item.name} = {_toml_value(getattr(section, item.name))}")
        lines.append("")
    return "\n".join(lines)


def _merge_file(values: dict[str, dict[str, Any]], path: Path, types_by_section: dict[str, type]) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"a configuration file must be readable; {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML; {error}") from None
    for section, content in document.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: settings must stand in a section such as [sync]; {section!r} stands alone")
        for name, value in content.items():
            _put(values, types_by_section, section, name, value, origin=str(path))


def _put(
    values: dict[str, dict[str, Any]],
    types_by_section: dict[str, type],
    section: str,
    name: str,
    value: Any,
    origin: str,
) -> None:
    if section not in types_by_section:
        if section in _SECTIONS_OF_TASKS:
            raise ConfigError(
                f"a section must be one of {', '.join(sorted(types_by_section))} here; {origin} has [{section}], which "
                f"is for {_SECTIONS_OF_TASKS[section]}; start that (it takes --config FILE), or take the section out; "
                f"a script of your own reads it by config, task = pyddl.load_config(FILE, sections={{{section!r}: "
                "CLASS}) and then calls pyddl.init(config, task=task)"
            )
        raise ConfigError(_unknown(f"section {section!r}", section, types_by_section, origin))
    known = {f.name for f in dataclasses.fields(types_by_section[section])}
    if name not in known:
        raise ConfigError(_unknown(f"setting {section}.{name}", name, known, origin, prefix=f"{section}."))
    values[section][name] = _convert(f"{section}.{name}", value, _section_type(types_by_section[section], name))


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to do about an unknown word: the nearest known one, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {prefix}{near[0]}?" if near else "known: " + ", ".join(known)


def _unknown(what: str, word: str, known: Iterable[str], origin: str, prefix: str = "") -> str:
    return f"unknown {what} in {origin}; {nearest(word, known, prefix)}"


def _section_type(owner: type, name: str) -> Any:
    return typing.get_type_hints(owner)[name]


def _convert(name: str, value: Any, wanted: Any) -> Any:
    """Bring a TOML value or a word of the command line to the type of the field."""
    if typing.get_origin(wanted) in (types.UnionType, typing.Union):  # X | None, Optional[X]
        inner = [t for t in typing.get_args(wanted) if t is not type(None)]
        if value is None or value == "none":
            return None
        wanted = inner[0]
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    elif wanted is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            try:
                return int(value.replace("_", ""))
            except ValueError:
                pass
    elif wanted is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif wanted is str:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)
    raise ConfigError(f"{name} must be of type {getattr(wanted, '__name__', wanted)}; got {value!r}")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if value is None:
        return '"none"'  # TOML has no null; _convert knows the word
    # A JSON string is a TOML basic string, but for DEL, which only TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
