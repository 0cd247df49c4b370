"""Stored commands, as a worker reads them."""

import pytest

from app.submission.command_lines import Command
from db.runs.command_spec import CommandSpec, read_command


def test_a_submitted_command_is_read() -> None:
    """Every field of a submitted command is read, with the same default."""
    assert read_command(Command(line="python a.py").model_dump()) == CommandSpec(line="python a.py")
    assert Command.model_fields.keys() == set(CommandSpec.__struct_fields__)
    stored = Command.model_validate(
        {
            "line": "python a.py --lr {lr}",
            "git": "https://h/r",
            "commit": "ab12",
            "variables": {"A": "1"},
            "secrets": ["TOKEN"],
            "parameters": {"lr": {"type": "number", "minimum": 0}},
        }
    ).model_dump(exclude_unset=True)
    read = read_command(stored)
    assert (read.git, read.commit, read.secrets) == ("https://h/r", "ab12", ["TOKEN"])
    assert read.parameters == {"lr": {"type": "number", "minimum": 0}}


def test_an_unknown_command_is_an_error() -> None:
    """An unreadable command fails its run with the invalid field."""
    with pytest.raises(ValueError, match="line"):
        read_command({})
    with pytest.raises(ValueError, match="secrets"):
        read_command({"line": "a", "secrets": "TOKEN"})
