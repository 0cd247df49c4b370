"""Command lines and their placeholders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.cli.command_line import fill_placeholders, placeholders, ranks_fault, words
from tests.marks import looped


def test_placeholders_are_named_once_in_order() -> None:
    """Each placeholder is listed once in order; other braces stay, doubled ones become single."""
    line = """python t.py {b} --x={a}{b} '{"k": {"n": 1}}' {{c}} {1} {} {é}"""
    assert placeholders(line) == ["b", "a"]
    assert fill_placeholders(line, {"a": 1e-05, "b": True}) == [
        *("python", "t.py", "true", "--x=1e-05true", '{"k": {"n": 1}}', "{c}", "{1}", "{}", "{é}")
    ]


@given(st.text(), st.text())
def test_a_value_stays_within_its_argument(first: str, second: str) -> None:
    """A value with spaces, quotes, braces or a placeholder stays one argument."""
    values = {"a": first, "b": second}
    assert fill_placeholders("p {a} 'x {b}' {a}{b}", values) == [
        "p",
        first,
        f"x {second}",
        first + second,
    ]


@looped(
    "line, message",
    [("", "empty"), ("''", "empty"), ("a 'b", "no closing quotation"), ("{a}", "placeholder")],
)
def test_an_invalid_command_line_is_reported(line: str, message: str) -> None:
    """An invalid command line gets an error in plain words."""
    with pytest.raises(ValueError, match=message):
        words(line)


@looped(
    "line, is_fine",
    [
        ("python train.py", True),
        ("/opt/venv/bin/python3.11 -m train --lr 1", True),
        ("python", False),
        ("python -m", False),
        ("python -c 1", False),
        ("sh train.sh", False),
        ("pythonic train.py", False),
    ],
)
def test_torchrun_starts_scripts_and_modules(line: str, is_fine: bool) -> None:
    """torchrun starts scripts and modules that Python would run, and nothing else."""
    assert (ranks_fault(line) is None) == is_fine
