"""The syncer's side of the set-up, and its exit.

Here: hearing all learners out, one configuration and one layout for all, the run's folder, windows, the first model;
then the loop (syncer.py) and the end of the process. Not here: the learners' side (session.py). No torch is needed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..config import Config, OuterConfig, RunConfig, SyncConfig, TimeoutConfig, to_toml
from ..core.layout import Layout
from ..core.layout_difference import describe_difference
from ..core.protocol import Protocol
from ..errors import ConfigError, LayoutMismatch, PyddlError, TransportError
from ..link.mailbox import Geometry
from . import guard, launcher
from .hello import LEAVE_S, SECTIONS, SETUP_REMEDY, frozen_change, frozen_difference, open_world, refusal, sections_of
from .processes import DeathWatch, describe_self

if TYPE_CHECKING:
    from ..link.port import LearnerPort
    from ..link.world import World

__all__ = ["serve", "serve_as_syncer"]

log = logging.getLogger(__name__)

_PROBE_NAP_S = 0.0001
_UNTOLD_SETUP_S = 86400.0


def serve_as_syncer(config: Config | None) -> NoReturn:
    """Serve on the synchronizer rank of an MPMD start; the configuration may come from the learners."""
    run = RunConfig() if config is None else config.run
    ranks = None if config is None else run.ranks
    # With no limit of its own it waits as long as the learners do: their alarms end the job.
    timeouts = TimeoutConfig(setup_s=_UNTOLD_SETUP_S) if config is None else config.timeouts
    world = open_world(ranks, run.learners, timeouts, only_serves=True)
    if world.role == "alone":
        world.leave(0, lost=False)
        raise ConfigError(
            "pyddl syncer must be rank 0 of a world with learners; it is alone in its world: "
            "mpiexec -n 1 pyddl syncer : -n N python train.py"
        )
    serve(config, world, "")


def serve(config: Config | None, world: World, task_toml: str) -> NoReturn:
    """The syncer's side: set up, serve, exit. ``config`` None: what the learners bring."""
    code = 1
    try:
        code = _serve(config, world, task_toml)
    except PyddlError as error:
        sys.stderr.write(f"pyddl: {error}\n")
        error.is_told = True
        code = error.exit_status
        world.leave(code, lost=not world.clean)
        raise SystemExit(code) from None
    world.leave(code, lost=world.lost)
    raise SystemExit(code)


def _serve(config: Config | None, world: World, task_toml: str) -> int:
    from ..link.alarm import deadline
    from ..link.port import LearnerPort
    from ..link.world import ProgressThread
    from ..store.checkpoint import set_aside_after
    from ..store.lock import RunLock
    from ..view.progress import open_view
    from .syncer import Syncer, new_global_state, protocol_config

    present: set[int] = set()

    def missing() -> str:
        gone = [str(m) for m in range(world.num_learners) if m not in present]
        return f"not yet attached: learner {', '.join(gone)}" if gone else "all learners have said hello"

    setup_s = config.timeouts.setup_s if config else _UNTOLD_SETUP_S
    with deadline(setup_s, "all learners must attach", missing, SETUP_REMEDY):
        hellos = []
        for m, pair in enumerate(world.pairs):
            hellos.append(pair.receive(source=1))
            present.add(m)
        lock: RunLock | None = None
        try:
            for hello in hellos:
                if "error" in hello:
                    raise refusal(hello)
            config = _agree(config, hellos)
            layout = _common_layout(hellos)
            if difference := frozen_difference([hello["frozen"] for hello in hellos], "learner"):
                raise LayoutMismatch(difference)
            folder, lock = _open_folder(config)
            checkpoint, checkpoint_path, sentences = _find_checkpoint(config, folder, layout, hellos[0]["frozen"])
            settings = protocol_config(config, layout, world.num_learners)
            if config.sync.quorum > world.num_learners:
                raise ConfigError(
                    f"sync.quorum (K) must be at most the number of learners, {world.num_learners}; "
                    f"got {config.sync.quorum}: no merge could ever happen"
                )
            geometry = Geometry(
                num_slots=settings.max_in_flight,
                num_ranks=world.num_ranks,
                num_elements=layout.largest_fragment_elements,
                num_counters=layout.largest_counters,
                wire=config.sync.wire,
            )
            world.require_memory(geometry.total_bytes * world.num_learners)
            if checkpoint is not None:
                _require_something_to_do(config, checkpoint.protocol)
                set_aside_after(checkpoint_path)  # last, since a resume that is refused must leave the folder as it was
            if folder is not None:
                _write_config(folder, config, task_toml or hellos[0]["task"])
        except PyddlError as error:
            for pair in world.pairs:
                pair.send({"error": str(error), "kind": type(error).__name__}, to=1)
            if lock is not None:
                lock.release()
            world.clean = True  # everybody is told and leaves
            raise
        protocol = Protocol(settings)
        state = new_global_state(config, layout)
        if checkpoint is not None:
            protocol.restore(checkpoint.protocol)
            for p, f in enumerate(checkpoint.fragments):
                state.load(p, f.theta, f.counters, version=f.version, momentum=f.momentum)
        run_token = secrets.randbits(63)
        for m, pair in enumerate(world.pairs):
            pair.send(
                {
                    "error": "",
                    "geometry": dataclasses.asdict(geometry),
                    "run_token": run_token,
                    "seed": m == 0 and checkpoint is None,
                    "step": protocol.step,
                    "tokens": protocol.tokens().processed,
                    "versions": [f.version for f in protocol.fragments],
                    "process": describe_self(),
                },
                to=1,
            )
        executor = ThreadPoolExecutor(2, "pyddl-copy")
        ports: dict[int, tuple[LearnerPort, DeathWatch]] = {}
        for m, pair in enumerate(world.pairs):
            memory = pair.expose(geometry.total_bytes)
            port = LearnerPort(
                memory,
                geometry,
                learner_id=m,
                incarnation=1,
                run_token=run_token,
                fence=pair.fence,
                copier=executor,
            )
            ports[m] = (port, DeathWatch(hellos[m]["processes"]))
        try:
            _probe_words(world, [port for port, _ in ports.values()])
        except TransportError:
            if lock is not None:
                lock.release()
            raise
        if checkpoint is None:
            for p, fragment in enumerate(layout.fragments):
                floats = np.empty(fragment.num_elements, dtype=np.float32)
                counters = np.empty(fragment.num_counters, dtype=np.int64)
                world.pairs[0].receive_array(floats, source=1)
                world.pairs[0].receive_array(counters, source=1)
                state.load(p, floats, counters)
        for pair in world.pairs:
            for v in state.versions():
                pair.broadcast_array(v.theta)
                pair.broadcast_array(v.counters)
    view = open_view(config)
    for sentence in [*sentences, _survival(world)]:
        view.say(sentence)
    progress = ProgressThread(world.pairs)
    progress.start()
    syncer = Syncer(
        config,
        layout,
        state,
        protocol,
        ports,
        folder=folder,
        view=view,
        set_busy=lambda busy: setattr(progress, "busy", busy),
        executor=executor,
        refresh=lock.refresh if lock else None,
        frozen=hellos[0]["frozen"],
    )
    syncer.ends_apart = launcher.detect(os.environ).survives is True
    _catch_signals(syncer)
    guard.protect()
    reason = syncer.serve()
    progress.end()
    executor.shutdown(wait=False)
    world.lost = syncer.after_loss
    if not world.lost:  # what the learners were told: each waits for a last word, and frees its window with us
        with deadline(LEAVE_S, "all learners must leave MPI together", "one has not"):
            for pair in world.pairs:
                for rank in range(1, 1 + world.num_ranks):
                    pair.send({"lost": syncer.saver.hangs}, to=rank)
            if not syncer.saver.hangs:
                for pair in world.pairs:
                    pair.close()
    if lock is not None and not syncer.saver.hangs:  # else the file system answers nobody
        lock.release()
    world.lost = world.lost or syncer.saver.hangs  # its thread may never end
    if world.lost:
        guard.part_from_hydra()  # else our end would be that of learners that still save
    if syncer.saver.hangs:
        end_s = time.monotonic() + LEAVE_S  # other launchers end the job with the first status that is not 0
        while not syncer.ends_apart and not syncer.learners_have_ended() and time.monotonic() < end_s:
            time.sleep(0.1)
        return 1
    return 0 if syncer.ended_well else _fail(syncer.saver.unsaved or reason)


def _probe_words(world: World, ports: list[LearnerPort]) -> None:
    """Rule 9: with each learner, whether single words are read whole; what is found is told to all.

    Raises:
        TransportError: if one was torn.
    """
    from ..link.world import mpi_version

    probes = [port.new_probe() for port in ports]
    waiting = dict(zip(world.pairs, probes, strict=True))
    while waiting:
        for pair, probe in list(waiting.items()):
            probe.turn()
            if pair.poll():
                probe.torn += pair.receive(source=1)["torn"]
                probe.end()
                del waiting[pair]
        time.sleep(_PROBE_NAP_S)  # on a machine with few cores the learners are to have their turns
    torn = {m: probe.torn for m, probe in enumerate(probes) if probe.torn}
    failure = ""
    if torn:
        found = ", ".join(f"learner {m}: {n}" for m, n in torn.items())
        failure = (
            f"single aligned 8-byte words must be read whole between learners and syncer; some were torn ({found}) "
            f"under {mpi_version()}: use another MPI or transport"
        )
    for pair in world.pairs:
        pair.send({"error": failure, "kind": "TransportError"}, to=1)
    if failure:
        world.clean = True  # everybody is told and leaves
        raise TransportError(failure)


def _fail(reason: str) -> int:
    sys.stderr.write(f"pyddl: the run ended early: {reason}\n")
    return 1


def _survival(world: World) -> str:
    """World mode never claims what it cannot keep."""
    found = launcher.detect(os.environ)
    if found.survives:
        return "the death of a learner is survivable under this launcher"
    if found.survives is None:
        return f"whether the others survive the death of a rank is not known here: {found.advice}"
    return f"the death of a rank will END this run. {found.advice}"


def _agree(config: Config | None, hellos: list[dict[str, Any]]) -> Config:
    """One configuration for all: every process must have been given the same."""
    wanted = sections_of(config) if config is not None else hellos[0]["config"]
    for m, hello in enumerate(hellos):
        for section in SECTIONS:
            for key, value in wanted[section].items():
                got = hello["config"][section].get(key)
                if got != value:
                    raise ConfigError(
                        f"all processes must be given the same configuration; {section}.{key} is {value!r} at the "
                        f"{'syncer' if config is not None else 'first learner'} and {got!r} at learner {m}"
                    )
    return Config(
        RunConfig(**wanted["run"]),
        SyncConfig(**wanted["sync"]),
        OuterConfig(**wanted["outer"]),
        TimeoutConfig(**wanted["timeouts"]),
    )


def _common_layout(hellos: list[dict[str, Any]]) -> Layout:
    layouts = [Layout.from_json(hello["layout"]) for hello in hellos]
    for m, other in enumerate(layouts):
        if other.fingerprint != layouts[0].fingerprint:
            raise LayoutMismatch(
                f"all learners must have the same model; learner {m} differs from learner 0:\n"
                + describe_difference(layouts[0], other)
            )
    return layouts[0]


def _open_folder(config: Config) -> tuple[Path | None, Any]:
    """Create and lock the run's folder."""
    from ..store.checkpoint import list_checkpoints
    from ..store.lock import RunLock

    if not config.run.dir:
        return None, None
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"run.dir must be a folder that can be made; {str(folder)!r}: {cause}") from None
    lock = RunLock(folder)
    lock.acquire()
    if not config.run.resume and list_checkpoints(folder):
        lock.release()
        raise ConfigError(
            f"run.dir must be a folder without a run, or run.resume be set; {folder} holds checkpoints: "
            "resume it (run.resume=true) or choose another folder"
        )
    tape = folder / "events.jsonl"
    if not config.run.resume and tape.exists() and tape.stat().st_size:  # the figures of two runs on one tape
        lock.release()
        raise ConfigError(
            f"run.dir must be a folder without a run; {folder} holds one that ended before its first checkpoint: "
            "remove that folder or choose another"
        )
    return folder, lock


def _write_config(folder: Path, config: Config, task_toml: str) -> None:
    from ..store.files import replacing

    text = to_toml({s: getattr(config, s) for s in SECTIONS}) + task_toml
    try:
        with replacing(folder / "config.toml") as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir must be a folder that can be written; {folder}: {error.strerror}") from None


def _require_something_to_do(config: Config, protocol: dict[str, Any]) -> None:
    """Refuse to resume a run that is at its end already: it would only replace its checkpoints."""
    tokens = sum(ledger["processed"] for ledger in protocol["ledgers"].values())
    for name, there in (("max_steps", protocol["step"]), ("max_tokens", tokens)):
        limit = getattr(config.run, name)
        if limit and there >= limit:
            raise ConfigError(
                f"the run is at its end already: run.{name} is {limit} and it stands at {there}; raise it"
            )


def _find_checkpoint(
    config: Config, folder: Path | None, layout: Layout, frozen: dict[str, int]
) -> tuple[Any, Any, list[str]]:
    """The newest good checkpoint of a run that is resumed, its path, and sentences about bad ones.

    Raises:
        LayoutMismatch: if it is of another model than ``layout`` and ``frozen`` (checksums by name) tell of.
    """
    from ..store.checkpoint import newest_good_checkpoint

    if not config.run.resume or folder is None:
        return None, None, []
    checkpoint, path, bad = newest_good_checkpoint(folder)
    if checkpoint.layout.fingerprint != layout.fingerprint:
        raise LayoutMismatch(
            f"the model must be that of the run in {folder}:\n" + describe_difference(checkpoint.layout, layout)
        )
    if change := frozen_change(checkpoint.meta.get("frozen", {}), frozen, str(path)):
        raise LayoutMismatch(change)
    return checkpoint, path, [*bad, f"resuming at step {checkpoint.step} from {path.name}"]


def _catch_signals(syncer: Any) -> None:
    """A time limit or Ctrl-C ends the run in good order; a second one ends it at once."""

    def stop(number: int, _frame: object) -> None:
        syncer.request_stop(f"signal {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
