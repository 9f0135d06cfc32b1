"""What the command lines of pyddl and of its tasks have in common.

Here: how errors are shown (one sentence, exit status 2 for a mistake of the user; nothing and 130 for Ctrl-C), and a
parser that names the nearest known word. Not here: any command (cli.py, tasks/). Needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from .errors import ConfigError, PyddlError

__all__ = ["CommandParser", "exit_status_of"]

_INTERRUPTED = 128 + signal.SIGINT


def exit_status_of(command: Callable[[], int]) -> int:
    """Run a command; its errors are shown here, and Ctrl-C ends it without a traceback.

    Once a run is set up, syncer and learners handle SIGINT themselves: this is for what comes before, which may last,
    since torch is imported there.
    """
    try:
        return command()
    except PyddlError as error:
        from .run.launcher import say_once

        say_once(error)
        return error.exit_status
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one, of the launcher, must not be heard of at exit
        if "pyddl.link.world" in sys.modules:
            _end_beside_mpi()
        return _INTERRUPTED
    except BrokenPipeError:
        return 0


def _end_beside_mpi() -> NoReturn:
    """End at once: other threads may be inside MPI, and nothing of it can be freed that others do not free, too."""
    from .run import guard

    guard.unlink_segments()  # which hydra lets lie when it ends the others
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_INTERRUPTED)


class CommandParser(argparse.ArgumentParser):
    """A parser that names the nearest known command or option for one that it does not know.

    Its errors are ConfigErrors, so that all ranks of a world together show them once. Settings (``section.key=value``,
    the open-ended argument ``settings``) may stand between options.
    """

    def add_subparsers(self, **keywords: Any) -> Any:
        """As of argparse; the commands are kept."""
        self._commands = super().add_subparsers(**keywords)
        return self._commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse, but for unknown words, which are refused here, where the known ones are known.

        Raises:
            ConfigError: for a command line that is wrong.
        """
        words = list(sys.argv[1:] if args is None else args)
        self._require_known(words)
        namespace, rest = super().parse_known_args(words, namespace)
        if hasattr(namespace, "settings"):  # of which argparse itself takes only what stands together
            namespace.settings = [*namespace.settings, *(word for word in rest if word != "--")]
        elif rest:
            self.error("unrecognized arguments: " + " ".join(rest))
        return namespace, []

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError where argparse ends the process."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _require_known(self, words: list[str]) -> None:
        commands = getattr(self, "_commands", None)
        options = list(self._option_string_actions)
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if not word.startswith("-") or re.match("-[0-9.]|-$", word) or " " in name:  # as argparse sees it
                if commands is None:
                    continue
                if word not in commands.choices:
                    self._refuse(f"command {word!r}", word, commands.choices)
                return  # the rest is the command's
            if not any(option.startswith(name) for option in options):  # argparse takes the beginning of one
                self._refuse(f"option {name}", name, options)

    def _refuse(self, what: str, word: str, known: Iterable[str]) -> NoReturn:
        from .config import nearest

        self.error(f"unknown {what}; {nearest(word, known)}")
