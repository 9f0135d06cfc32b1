"""``pyddl settings``: every setting as a TOML file, with the meaning that its docstring gives.

Here: reading the ``Attributes:`` of the configuration's docstrings. Not here: the settings (config.py, tasks/).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from ..config import Config, to_toml

__all__ = ["describe_settings", "meanings"]

_WIDTH = 100


def meanings(section: object) -> dict[str, str]:
    """What the docstring of a section's class says of each of its fields, by name, in one line each."""
    text = inspect.getdoc(type(section)) or ""
    _, _, attributes = text.partition("Attributes:\n")
    found: dict[str, str] = {}
    for names, meaning in re.findall(r"^ {4}([\w, ]+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


def describe_settings(task: Mapping[str, Any]) -> str:
    """All sections at their defaults, as TOML that ``--config`` takes.

    Args:
        task: further sections, by name; one of pyddl's own is shown in place of its defaults.
    """
    config = Config()
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | dict(task)
    lines: list[str] = []
    for name, section in sections.items():
        said = meanings(section)
        for line in to_toml({name: section}).splitlines():
            key = line.partition(" = ")[0]
            if key in said:
                lines += textwrap.wrap(said[key], _WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(line)
    return "\n".join(lines) + "\n"
