"""The command line: ``pyddl train | syncer | guard | info | settings | inspect | export``.

Here: arguments and dispatch. Not here: how errors are shown (commands.py), what the commands do. Each imports what it
needs when it is called, so ``pyddl info`` works on a login node.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .commands import CommandParser, exit_status_of
from .errors import ConfigError

__all__ = ["main"]

_SETTINGS_HELP = "settings that override the file's, such as sync.quorum=2 run.max_steps=1000 lm.lr=0.001"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status_of(lambda: _run(words))


def _run(words: list[str]) -> int:
    if words[:1] == ["guard"]:  # everything after it belongs to the guarded command
        from .run import guard

        return guard.main(words[1:])
    arguments = _parser().parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="pyddl: %(message)s")
    return int(arguments.run_command(arguments) or 0)


def _parser() -> CommandParser:
    from . import __version__

    parser = CommandParser(
        prog="pyddl", description="Decoupled DiLoCo over MPI: learners that never wait for one another."
    )
    parser.add_argument("--version", action="version", version=f"pyddl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train the built-in language model; start it under mpiexec or srun")
    train.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
    train.add_argument("--data", metavar="PATH", help="files or folders of text; default: Python's own library")
    train.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    train.add_argument("settings", nargs="*", metavar="section.key=value", help=_SETTINGS_HELP)
    train.set_defaults(run_command=_train)

    syncer = commands.add_parser("syncer", help="serve as the synchronizer rank of an MPMD start; needs no torch")
    syncer.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; default: what the learners bring")
    syncer.add_argument("settings", nargs="*", metavar="section.key=value", help=_SETTINGS_HELP)
    syncer.set_defaults(run_command=_syncer)

    guard = commands.add_parser("guard", help="run a command as a rank whose death the others survive", add_help=False)
    guard.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")

    info = commands.add_parser("info", help="versions, MPI and what it survives, kernels; plan of a run's sizes")
    info.add_argument("--parameters", type=float, metavar="N", help="plan: parameters of the model, such as 7e9")
    info.add_argument("--learners", type=int, default=8, metavar="M", help="plan: learners (default 8)")
    info.add_argument("--step-s", type=float, default=1.0, metavar="S", help="plan: seconds of an inner step")
    info.add_argument("settings", nargs="*", metavar="section.key=value", help=_SETTINGS_HELP)
    info.set_defaults(run_command=_info)

    settings = commands.add_parser("settings", help="every setting with its default and meaning, as a TOML file")
    settings.add_argument("--lm", action="store_true", help="also those of the built-in language model (pyddl train)")
    settings.set_defaults(run_command=_settings)

    inspect = commands.add_parser("inspect", help="what a run's folder holds: figures, losses, checkpoints")
    inspect.add_argument("run", type=Path, metavar="RUN")
    inspect.add_argument("--json", action="store_true", help="as one JSON object")
    inspect.set_defaults(run_command=_inspect)

    export = commands.add_parser("export", help="write a run's global model as safetensors")
    export.add_argument("run", type=Path, metavar="RUN", help="a run's folder or a checkpoint")
    export.add_argument("out", type=Path, metavar="FILE.safetensors")
    export.set_defaults(run_command=_export)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from .run import guard
    from .run.launcher import detect

    words = list(arguments.settings)
    file: Path | None = arguments.config
    if arguments.data is not None:
        words.append(f"lm.data={arguments.data}")
    if arguments.resume is not None:
        folder = Path(arguments.resume)
        if other := [word for word in words if word.startswith("run.dir=")]:
            raise ConfigError(f"a run is resumed in its own folder, {folder}; got {other[0]} as well: leave it out")
        file = file or folder / "config.toml"
        words += [f"run.dir={folder}", "run.resume=true"]
    found = detect(ancestors=())
    if found.name in ("mpich", "openmpi") and not found.guarded:
        guard.restart_under_guard()  # before torch and MPI: this process becomes the small parent of its rank
    from .config import load_config
    from .tasks import lm

    config, sections = load_config(file, words, sections={"lm": lm.LMConfig}, defaults=lm.RECOMMENDED)
    lm.main(config, sections["lm"])
    return 0


def _syncer(arguments: argparse.Namespace) -> int:
    from .config import load_config
    from .run import guard
    from .run.launcher import detect
    from .run.serving import serve_as_syncer

    found = detect(ancestors=())
    if found.name in ("mpich", "openmpi") and not found.guarded:
        guard.restart_under_guard()
    given = arguments.config is not None or arguments.settings
    config = load_config(arguments.config, arguments.settings)[0] if given else None
    serve_as_syncer(config)


def _info(arguments: argparse.Namespace) -> int:
    from .config import load_config
    from .view import info

    config, _ = load_config(None, arguments.settings)
    info.show_versions()
    if arguments.parameters is not None:
        if not 1 <= arguments.parameters <= 1e15:
            raise ConfigError(f"--parameters must be at least 1 and at most 1e15; got {arguments.parameters}")
        if arguments.learners < 1 or not arguments.step_s > 0:
            raise ConfigError("--learners must be at least 1 and --step-s positive")
        info.show_plan(config, int(arguments.parameters), arguments.learners, arguments.step_s)
    return 0


def _settings(arguments: argparse.Namespace) -> int:
    from .view.settings import describe_settings

    task: dict[str, Any] = {}
    if arguments.lm:
        from .config import load_config
        from .tasks import lm

        an_end = ["run.max_steps=1000"]  # which the schedule needs, and which is not shown
        config, _ = load_config(None, an_end, defaults=lm.RECOMMENDED)
        task = {"sync": config.sync, "lm": lm.LMConfig()}
        sys.stdout.write("# pyddl train has defaults of its own, which stand here: " + " ".join(lm.RECOMMENDED) + "\n")
    sys.stdout.write(describe_settings(task))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from .view import inspect

    inspect.show_run(arguments.run, as_json=arguments.json)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from .store.export import export_safetensors

    path = export_safetensors(arguments.run, arguments.out)
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
