"""A command line with placeholders: `python train.py --lr {lr}`.

It is split as a shell would, and no shell ever sees it: a value stays within its argument, whatever
it holds. `{{lr}}` is the text {lr}; other braces are themselves.
"""

import re
import shlex
from collections.abc import Mapping
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool

NAME_CHARACTERS = 50
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}", re.ASCII)
PYTHON = re.compile(r"(.*/)?python[0-9.]*")


def words(line: str) -> list[str]:
    """Split a command line into arguments, with their placeholders. Raises ValueError."""
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"it cannot be split into arguments: {error}".lower()) from error
    if not arguments or not arguments[0]:
        raise ValueError("it is empty; allowed: a program and its arguments")
    if PLACEHOLDER.search(arguments[0]):
        raise ValueError(f"its program is {arguments[0]}; allowed: one without a placeholder")
    return arguments


def placeholders(line: str) -> list[str]:
    """Return the names of its placeholders, each once, in their order. Raises ValueError."""
    names = (match[2] for word in words(line) for match in PLACEHOLDER.finditer(word))
    return list(dict.fromkeys(filter(None, names)))


def fill_placeholders(line: str, values: Mapping[str, Value]) -> list[str]:
    """Return its arguments with these values in their places. Raises ValueError, KeyError."""

    def fill(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] else in_words(values[match[2]])

    return [PLACEHOLDER.sub(fill, word) for word in words(line)]


def in_words(value: Value) -> str:
    """Return a value as a command line has it: true, 1e-05, 3."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def ranks_fault(line: str) -> str | None:
    """Return why torchrun cannot start this once per device, or None if it can."""
    arguments = words(line)
    if PYTHON.fullmatch(arguments[0]) and len(arguments) > 1:
        is_module = arguments[1] == "-m" and len(arguments) > 2
        if is_module or not arguments[1].startswith("-"):
            return None
    return "on several devices, where torchrun starts it; allowed: python SCRIPT … or python -m …"
