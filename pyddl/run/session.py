"""``pyddl.init()`` and ``Session.attach()``: how a process finds its place in a run.

Here: the set-up of world mode on both sides (hello, welcome, window, first model), the run's folder and its lock, the
end of a process's part in MPI. Not here: the syncer's loop (syncer.py), the step boundary (learner.py). Torch is
imported only by :meth:`Session.attach`, so the sync rank serves without it.

    learner -> syncer   hello    configuration, layout, host and process ids
    syncer -> learner   welcome  the mailbox's geometry, the clock; or the sentence that refuses
    both                the window (collective over the pair)
    learner 0 -> syncer its model, if the run has no state yet: the only time that a learner seeds it
    syncer -> learners  Theta
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..config import Config, OuterConfig, RunConfig, SyncConfig, TimeoutConfig, load_config, to_toml
from ..core.layout import Layout, build_layout, describe_difference
from ..core.protocol import Protocol
from ..errors import CheckpointError, ConfigError, LayoutMismatch, PyddlError, TransportError
from ..link.mailbox import Geometry
from . import guard, launcher
from .processes import DeathWatch, describe_self

if TYPE_CHECKING:
    import torch

    from ..link.world import World
    from .learner import Learner

__all__ = ["Session", "init", "serve_as_syncer"]

log = logging.getLogger(__name__)

_SIGNAL_PATIENCE_S = 5.0  # a learner that was told to end waits so long for the run to end
_LEAVE_S = 60.0  # to free windows together; nobody has anything else to do then
_SECTIONS = ("run", "sync", "outer", "timeouts")


def init(
    config: Config | str | Path | None = None,
    /,
    *,
    task: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Session:
    """Join the run that this process was started for.

    On the synchronizer rank this serves the run and exits; it returns on learners only. A process that is alone in its
    world trains alone, with one warning, unless the launcher says that there should be more (then it is refused).

    Args:
        config: a Config, or a TOML file; None: defaults.
        task: further sections (dataclasses, by name) to be kept in the run's config.toml.
        **sections: settings on top, by section: ``pyddl.init(run={"max_steps": 1000}, sync={"quorum": 2})``.

    Raises:
        ConfigError: if the configuration or the world's size is wrong.
    """
    return Session(_resolve(config, task or {}, sections), task or {})


def _resolve(
    config: Config | str | Path | None, task: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> Config:
    if config is not None and not isinstance(config, (Config, str, Path)):
        raise ConfigError(f"pyddl.init() takes a Config, the path of a TOML file or nothing; got {config!r}")
    words = [f"{s}.{k}={v}" for s, values in sections.items() for k, v in values.items()]
    file = None
    if isinstance(config, Config):  # settings are checked against one another: only all of them together
        if not words:
            return config
        words = [f"{s}.{k}={v}" for s, values in _as_dict(config).items() for k, v in values.items()] + words
    else:
        file = config
    known = {name: type(section) for name, section in task.items()}
    return load_config(file, words, sections=known, origin="pyddl.init()")[0]


class Session:
    """This process's place in the run; made by :func:`init`."""

    def __init__(self, config: Config, task: Mapping[str, Any]) -> None:
        _require_first_process()
        expected = launcher.expected_tasks(os.environ)
        self.config = config
        self._task_toml = to_toml(task)
        self._attached = False
        self.world = _open_world(config.run.ranks, config.run.learners, config.timeouts)
        if self.world.role == "alone":
            if expected is not None and expected > 1:
                self.world.leave(0, lost=False)
                raise ConfigError(
                    f"the launcher has started {expected} tasks, and MPI sees a world of 1: the MPI library and the "
                    "launcher do not fit. " + launcher.detect(os.environ).advice
                )
            if config.run.resume:
                self.world.leave(0, lost=False)
                raise ConfigError(
                    "run.resume needs a world with a syncer; this process is alone in its MPI world: use mpiexec"
                )
            log.warning(
                "this process is alone in its MPI world: it trains without a syncer, and nothing is written to run.dir "
                "(start it with mpiexec)"
            )
        if self.world.role == "syncer":
            serve(config, self.world, self._task_toml)
        atexit.register(_finalize, self.world)

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Learner:
        """Connect a model and its optimizer with the run. Collective over all ranks of the world.

        The model's parameters become the run's Theta (those of learner 0 seed a fresh run). The optimizer's moments
        stay the learner's own. Afterwards do not replace parameter tensors; values may be changed at will.

        Raises:
            LayoutMismatch: if the model differs from the other learners' or from the run's.
            ConfigError: if the model cannot be fragmented as asked, or is on a device that is not supported.
        """
        from ..store.background import BackgroundTrace
        from .learner import Learner
        from .learner_state import load_learner, save_learner
        from .replica import Replica, tensor_specs

        world, config = self.world, self.config
        if self._attached:
            raise ConfigError("Session.attach() can be called once, with the whole model; it was called again")
        self._attached = True
        layout, replica, failure = None, None, None
        try:
            specs = tensor_specs(model)
            layout = build_layout(specs, num_fragments=config.sync.num_fragments, policy=config.sync.fragmentation)
            replica = Replica(model, layout)
        except PyddlError as error:
            if world.role != "learner":
                raise
            failure = error
        learner_id = max(0, world.learner_id)
        link = None
        if world.role == "learner":
            link = _join(config, world, layout, replica, failure, self._task_toml)
        folder = Path(config.run.dir) if config.run.dir and world.role == "learner" else None
        first = world.group is None or world.group.rank == 0
        receipts = BackgroundTrace(
            folder / f"receipts-{learner_id}.jsonl" if folder and first else None,
            fields={"role": "learner", "learner_id": learner_id},
        )
        assert replica is not None  # or the run has been refused
        learner = Learner(
            config,
            model,
            optimizer,
            replica,
            link,
            learner_id=learner_id,
            num_learners=world.num_learners,
            num_ranks=world.num_ranks,
            receipts=receipts,
            save=lambda who: save_learner(folder, who),
            save_beside=lambda who: save_learner(folder, who, beside=True),
        )
        if link is not None:
            _end_with_the_run_on_signals(learner)
        if config.run.resume and folder is not None:
            load_learner(folder, learner)
        return learner


def _require_first_process() -> None:
    """A DataLoader's worker that imports the script again must not start MPI a second time."""
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "pyddl.init() must run in the process that the launcher started; this is a worker process that has "
            'imported the script again: put the script\'s body under if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("pyddl.init() must be called in the main thread; it was called in another")


def _open_world(ranks: int | None, num_learners: int, timeouts: TimeoutConfig) -> World:
    from ..link.world import World, deadline

    with deadline(timeouts.setup_s, "all ranks must come into MPI", lambda: "another rank has not come"):
        return World(ranks_per_learner=ranks, num_learners=num_learners, group_timeout_s=timeouts.group_s)


def _join(
    config: Config, world: World, layout: Layout | None, replica: Any, failure: PyddlError | None, task_toml: str
) -> Any:
    """The learner's side of the set-up. A learner that cannot take part says why, and all are refused with that."""
    from ..link.buffers import BufferPool
    from ..link.courier import Courier
    from ..link.world import deadline
    from .learner import Link

    group, pair = world.group, world.pairs[0]
    assert group is not None
    what = "all ranks must attach"
    with deadline(config.timeouts.setup_s, what, lambda: "the syncer (rank 0) or another learner has not answered"):
        frozen = replica.frozen_checksums() if replica else {}
        mine = json.dumps([layout.fingerprint if layout else f"{failure}", frozen])
        models = [json.loads(text) for text in group.gather_strings(mine)]
        processes = [json.loads(p) for p in group.gather_strings(json.dumps(describe_self()))]
        group.mates_ended = DeathWatch(processes).ended
        if any(fingerprint != models[0][0] for fingerprint, _ in models):
            failure = LayoutMismatch("all ranks of a learner must have the same model; their parameters differ")
        elif difference := _frozen_difference(
            [checksums for _, checksums in models], f"rank of learner {world.learner_id}"
        ):
            failure = LayoutMismatch(difference)
        if group.rank == 0:
            hello: dict[str, Any] = {"config": _as_dict(config), "processes": processes, "task": task_toml}
            if failure is not None:
                hello |= {"error": str(failure), "kind": type(failure).__name__}
            elif layout is not None:
                hello |= {"layout": layout.to_json(), "frozen": frozen}
            pair.send(hello, to=0)
            welcome = json.dumps(pair.receive(source=0))
        else:
            welcome = ""
        answer = json.loads(group.gather_strings(welcome)[0])
        if answer["error"]:
            world.clean = True  # all ranks of the world are told
            raise _refusal(answer)
        assert layout is not None
        geometry = Geometry(**answer["geometry"])
        window = pair.open()
        if answer["seed"] and group.rank == 0:
            for p, fragment in enumerate(layout.fragments):
                floats = np.empty(fragment.num_elements, dtype=np.float32)
                replica.copy_out(p, floats)
                pair.send_array(floats, to=0)
                pair.send_array(replica.counters(p), to=0)
        pool = BufferPool(layout.largest_fragment_elements, geometry.num_slots + 2)
        anchors = []
        for p, fragment in enumerate(layout.fragments):
            floats = pool.take(fragment.num_elements)
            counters = np.empty(fragment.num_counters, dtype=np.int64)
            pair.broadcast_array(floats)
            pair.broadcast_array(counters)
            replica.copy_in(p, floats)
            replica.set_counters(p, counters)
            anchors.append(floats)
    courier = Courier(
        window,
        geometry,
        layout,
        learner_id=world.learner_id,
        rank=group.rank,
        gather=group if group.size > 1 else None,
        run_token=answer["run_token"],
        stall_s=config.timeouts.stall_s,
        pool=pool,
    )
    courier.start()
    guard.protect()

    def leave(exit_code: int, lost: bool) -> None:
        world.lost = world.lost or lost
        if exit_code:
            world.leave(exit_code, lost=True)
        if not world.lost:
            with deadline(_LEAVE_S, "the syncer must leave MPI with its learners", lambda: "it has not"):
                pair.close()
            world.clean = True

    return Link(
        courier,
        pool,
        geometry,
        layout,
        group,
        answer["run_token"],
        1,
        list(answer["versions"]),
        anchors,
        answer["step"],
        answer["tokens"],
        leave,
    )


def _finalize(world: World) -> None:
    """At exit: finalize MPI if everybody lives and has left in good order, else just end."""
    if world.role == "alone" or world.clean:
        world.leave(0, lost=False)


def serve_as_syncer(config: Config | None) -> NoReturn:
    """Serve on the synchronizer rank of an MPMD start; the configuration may come from the learners."""
    run = RunConfig() if config is None else config.run
    ranks = None if config is None else run.ranks
    world = _open_world(ranks, run.learners, TimeoutConfig() if config is None else config.timeouts)
    if world.role != "syncer":
        world.leave(0, lost=False)
        raise ConfigError(
            f"pyddl syncer must be rank 0 of a world with learners; it is rank {world.rank} of {world.size}: "
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
    from ..link.port import LearnerPort
    from ..link.world import ProgressThread, deadline
    from ..store.lock import RunLock
    from ..view.progress import open_view
    from .syncer import Syncer, new_global_state, protocol_config

    present: set[int] = set()

    def missing() -> str:
        gone = [str(m) for m in range(world.num_learners) if m not in present]
        return f"not yet attached: learner {', '.join(gone)}" if gone else "all learners have said hello"

    setup_s = config.timeouts.setup_s if config else TimeoutConfig().setup_s
    with deadline(setup_s, "all learners must attach", missing):
        hellos = []
        for m, pair in enumerate(world.pairs):
            hellos.append(pair.receive(source=1))
            present.add(m)
        lock: RunLock | None = None
        try:
            for hello in hellos:
                if "error" in hello:
                    raise _refusal(hello)
            config = _agree(config, hellos)
            layout = _common_layout(hellos)
            if difference := _frozen_difference([hello["frozen"] for hello in hellos], "learner"):
                raise LayoutMismatch(difference)
            folder, lock = _open_folder(config)
            checkpoint, sentences = _find_checkpoint(config, folder, layout)
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
    )
    syncer.ends_apart = launcher.detect(os.environ).survives is True
    _catch_signals(syncer)
    guard.protect()
    reason = syncer.serve()
    progress.end()
    executor.shutdown(wait=False)
    world.lost = syncer.after_loss
    if not world.lost:  # what the learners were told: each frees its window with us
        with deadline(_LEAVE_S, "all learners must leave MPI together", lambda: "one has not"):
            for pair in world.pairs:
                pair.close()
    if lock is not None:
        lock.release()
    return 0 if syncer.ended_well else _fail(reason)


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
    return f"the death of a rank will END this run: {found.advice}"


def _as_dict(config: Config) -> dict[str, Any]:
    return {name: dataclasses.asdict(getattr(config, name)) for name in _SECTIONS}


def _agree(config: Config | None, hellos: list[dict[str, Any]]) -> Config:
    """One configuration for all: every process must have been given the same."""
    wanted = _as_dict(config) if config is not None else hellos[0]["config"]
    for m, hello in enumerate(hellos):
        for section in _SECTIONS:
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


def _frozen_difference(checksums: list[dict[str, int]], whose: str) -> str:
    """In which frozen tensors some differ from the first, as a sentence; empty if in none.

    Nothing of a frozen tensor is ever sent, so with others the same Theta would be another model.

    Args:
        checksums: by name, of each learner or of each rank; the layouts, and so the names, are equal.
        whose: what each one belongs to, such as "learner".
    """
    first = checksums[0]
    names = [name for name in first if any(other[name] != first[name] for other in checksums)]
    if not names:
        return ""
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    those = ", ".join(str(i) for i, other in enumerate(checksums) if other != first)
    return (
        f"frozen tensors must be equal everywhere, since they are never sent; {few} of {whose} {those} differ from "
        f"those of {whose} 0: load the same values everywhere (or set the same seed before the model is made)"
    )


def _open_folder(config: Config) -> tuple[Path | None, Any]:
    """Create and lock the run's folder."""
    from ..store.checkpoint import list_checkpoints
    from ..store.lock import RunLock

    if not config.run.dir:
        return None, None
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir must be a folder that can be made; {folder}: {error.strerror}") from None
    lock = RunLock(folder)
    lock.acquire()
    if not config.run.resume and list_checkpoints(folder):
        lock.release()
        raise ConfigError(
            f"run.dir must be a folder without a run, or run.resume be set; {folder} holds checkpoints: "
            "resume it (run.resume=true) or choose another folder"
        )
    return folder, lock


def _write_config(folder: Path, config: Config, task_toml: str) -> None:
    from ..store.files import replacing

    text = to_toml({s: getattr(config, s) for s in _SECTIONS}) + task_toml
    try:
        with replacing(folder / "config.toml") as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir must be a folder that can be written; {folder}: {error.strerror}") from None


def _find_checkpoint(config: Config, folder: Path | None, layout: Layout) -> tuple[Any, list[str]]:
    """The newest good checkpoint of a run that is resumed, and sentences about bad ones."""
    from ..store.checkpoint import newest_good_checkpoint

    if not config.run.resume or folder is None:
        return None, []
    checkpoint, path, bad = newest_good_checkpoint(folder)
    if checkpoint.layout.fingerprint != layout.fingerprint:
        raise LayoutMismatch(
            f"the model must be that of the run in {folder}:\n" + describe_difference(checkpoint.layout, layout)
        )
    return checkpoint, [*bad, f"resuming at step {checkpoint.step} from {path.name}"]


def _catch_signals(syncer: Any) -> None:
    """A time limit or Ctrl-C ends the run in good order; a second one ends it at once."""

    def stop(number: int, _frame: object) -> None:
        syncer.request_stop(f"signal {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)


def _end_with_the_run_on_signals(learner: Learner) -> None:
    """Ctrl-C or a launcher's SIGTERM reaches every rank: the learner goes on until its board says that the run ends.

    Where the board says nothing for five seconds the signal was meant for this learner alone, and ends it; so does a
    second one.
    """

    def note(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)

        def end() -> None:
            if not learner.sees_the_end():
                os.kill(os.getpid(), number)

        timer = threading.Timer(_SIGNAL_PATIENCE_S, end)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)


def _refusal(answer: dict[str, Any]) -> PyddlError:
    kinds = {c.__name__: c for c in (ConfigError, LayoutMismatch, CheckpointError, TransportError)}
    error: PyddlError = kinds.get(answer["kind"], PyddlError)(answer["error"])
    error.is_told = True  # by the syncer
    return error
