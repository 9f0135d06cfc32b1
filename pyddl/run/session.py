"""``pyddl.init()`` and ``Session.attach()``: how a process finds its place in a run.

Here: the learner's side of the set-up, and its signals. Not here: the syncer's side (serving.py), the step boundary
(learner.py). Torch is imported only by :meth:`Session.attach`, so the sync rank serves without it.

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
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import Config, load_config, to_toml
from ..core.layout import Layout, build_layout
from ..errors import ConfigError, LayoutMismatch, PyddlError
from ..link.mailbox import Geometry
from . import guard, launcher
from .hello import LEAVE_S, SETUP_REMEDY, frozen_difference, open_world, refusal, sections_of
from .processes import DeathWatch, describe_self
from .serving import serve

if TYPE_CHECKING:
    import torch

    from ..link.world import Pair, World
    from .learner import Learner

__all__ = ["Session", "init"]

log = logging.getLogger(__name__)

_NAP_S, _LOOK_S = 0.005, 0.5  # of who waits for the syncer's last word
_SIGNAL_PATIENCE_S = 5.0  # a learner that was told to end waits so long for the run to end


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
    _show_mistakes_once()
    return Session(_resolve(config, task or {}, sections), task or {})


def _resolve(
    config: Config | str | Path | None, task: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> Config:
    if config is not None and not isinstance(config, (Config, str, Path)):
        raise ConfigError(f"pyddl.init() takes a Config, the path of a TOML file or nothing; got {config!r}")
    for name, values in sections.items():
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"pyddl.init() takes settings by section, such as run={{'max_steps': 1000}}; got {name}={values!r}"
            )
    for name, section in task.items():
        if not dataclasses.is_dataclass(section) or isinstance(section, type):
            raise ConfigError(
                f"pyddl.init(task=...) takes instances of a dataclass, by the section's name; got {name}={section!r}"
            )
    words = [f"{s}.{k}={v}" for s, values in sections.items() for k, v in values.items()]
    file = None
    if isinstance(config, Config):  # settings are checked against one another: only all of them together
        if not words:
            return config
        words = [f"{s}.{k}={v}" for s, values in sections_of(config).items() for k, v in values.items()] + words
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
        self.world = open_world(config.run.ranks, config.run.learners, config.timeouts)
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
        stay the learner's own. Afterwards do not replace parameter tensors; values are changed by the optimizer, or by
        anything else before learner.step() is called (``sync.overlap_snapshots``).

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
            save=lambda who: save_learner(folder, who, limit_s=config.timeouts.save_s),
            save_beside=lambda who: save_learner(folder, who, beside=True),
        )
        if link is not None:
            _end_with_the_run_on_signals(learner)
        if config.run.resume and folder is not None:
            load_learner(folder, learner)
        if link is not None:
            atexit.register(_remind_of_close, learner)
        return learner


def _show_mistakes_once() -> None:
    """An error of pyddl that a script does not catch is shown as its sentence, by one rank, not as N tracebacks."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, PyddlError):
            launcher.say_once(error)
            raise SystemExit(error.exit_status)
        if isinstance(error, KeyboardInterrupt) and _is_in_set_up(trace):
            launcher.say_by_first("interrupted")
        else:
            previous(kind, error, trace)

    if previous.__name__ != "show":
        sys.excepthook = show


def _is_in_set_up(trace: types.TracebackType | None) -> bool:
    """Whether init() or attach() was interrupted, and not the user's loop."""
    while trace is not None:
        if trace.tb_frame.f_code in (init.__code__, Session.attach.__code__):
            return True
        trace = trace.tb_next
    return False


def _is_preloaded() -> bool:
    """Whether a fork server runs the script, which is nobody's child process but calls it by another name."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def _require_first_process() -> None:
    """A DataLoader's worker that imports the script again must not start MPI a second time."""
    if multiprocessing.parent_process() is not None or _is_preloaded():
        raise ConfigError(
            "pyddl.init() must run in the process that the launcher started; this is a worker process that has "
            'imported the script again: put the script\'s body under if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("pyddl.init() must be called in the main thread; it was called in another")


def _join(
    config: Config, world: World, layout: Layout | None, replica: Any, failure: PyddlError | None, task_toml: str
) -> Any:
    """The learner's side of the set-up. A learner that cannot take part says why, and all are refused with that."""
    from ..link.alarm import deadline
    from ..link.buffers import BufferPool
    from ..link.courier import Courier
    from ..link.probe import probe_as_learner
    from .exchange import Link

    group, pair = world.group, world.pairs[0]
    assert group is not None
    what = "all ranks must attach"
    with deadline(
        config.timeouts.setup_s, what, lambda: "the syncer (rank 0) or another learner has not answered", SETUP_REMEDY
    ):
        frozen = replica.frozen_checksums() if replica else {}
        mine = json.dumps([layout.fingerprint if layout else f"{failure}", frozen])
        models = [json.loads(text) for text in group.gather_strings(mine)]
        processes = [json.loads(p) for p in group.gather_strings(json.dumps(describe_self()))]
        group.mates_ended = DeathWatch(processes).ended
        if any(fingerprint != models[0][0] for fingerprint, _ in models):
            failure = LayoutMismatch("all ranks of a learner must have the same model; their parameters differ")
        elif difference := frozen_difference(
            [checksums for _, checksums in models], f"rank of learner {world.learner_id}"
        ):
            failure = LayoutMismatch(difference)
        if group.rank == 0:
            hello: dict[str, Any] = {"config": sections_of(config), "processes": processes, "task": task_toml}
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
            raise refusal(answer)
        assert layout is not None
        geometry = Geometry(**answer["geometry"])
        window = pair.open()
        torn = probe_as_learner(window, geometry.heartbeat_word(group.rank), geometry.down_word(0))
        found = [int(text) for text in group.gather_strings(str(torn))]
        verdict = ""
        if group.rank == 0:
            pair.send({"torn": sum(found)}, to=0)
            verdict = json.dumps(pair.receive(source=0))
        told = json.loads(group.gather_strings(verdict)[0])
        if told["error"]:
            world.clean = True  # all ranks of the world are told
            raise refusal(told)
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
    syncer = DeathWatch([answer["process"]])

    def leave(exit_code: int, lost: bool) -> None:
        world.lost = world.lost or lost
        if exit_code:
            world.leave(exit_code, lost=True)
        if not world.lost:
            world.lost = _last_word(pair, config.timeouts.save_s + LEAVE_S, syncer)
            if not world.lost:
                with deadline(LEAVE_S, "the syncer must leave MPI with its learners", "it has not"):
                    pair.close()
            world.clean = not world.lost
        if world.lost:
            guard.part_from_hydra()

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


def _last_word(pair: Pair, limit_s: float, syncer: DeathWatch) -> bool:
    """Wait, asleep, until the syncer has written its last checkpoint; whether MPI is to be left as after a loss."""
    end_s, look_s = time.monotonic() + limit_s, 0.0
    while not pair.poll():
        now_s = time.monotonic()
        if now_s > look_s:
            look_s = now_s + _LOOK_S
            has_died = syncer.ended() is not None and not pair.poll()  # its word may have come just now
            if now_s > end_s or has_died:
                log.error(
                    "the syncer must say within %.0f s how to leave MPI and %s; this learner has the final model",
                    limit_s,
                    "has died" if has_died else "did not",
                )
                return True
        time.sleep(_NAP_S)
    return bool(pair.receive(source=0)["lost"])


def _finalize(world: World) -> None:
    """At exit: finalize MPI if everybody lives and has left in good order, else just end."""
    if world.role == "alone" or world.clean:
        world.leave(0, lost=False)


def _remind_of_close(learner: Learner) -> None:
    """At exit, unless an error is the reason, which has been shown."""
    if not (learner.closed or launcher.has_shown_error() or getattr(sys, "last_value", None)):
        sys.stderr.write(
            f"pyddl: learner {learner.learner_id} rank {learner.rank} ended without learner.close(): it counts as "
            "lost, its model is not the global one, and its state is not saved: call close() after the loop\n"
        )


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
