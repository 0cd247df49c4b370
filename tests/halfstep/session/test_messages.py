"""Messages on stderr give the reason of each kind of rejection, for any number of them."""

from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.session.stderr import MOST_OF_A_KIND, Messages, kind_of
from tests.marks import looped


def test_a_few_of_each_kind_are_printed_and_the_others_counted() -> None:
    """A few messages of each kind are printed, each text once, and the others counted by kind."""
    printed: list[str] = []
    messages = Messages(printed.append)
    for number in range(100):
        messages.say_once(f"loss {number} is not logged: it is [{number}]; allowed: a number")
        messages.say_once(f"log is ignored: its step is {number - 0.5}; allowed: a whole number")
        messages.say_once("the disk is full")
    assert len(printed) == 2 * MOST_OF_A_KIND + 1
    messages.say_once("another")
    assert printed[-1] == "another"
    messages.end()
    assert printed[-2].startswith("95 more like: loss 0 is not logged")
    assert printed[-1].startswith("95 more like: log is ignored")


@looped(
    "first, second, is_same",
    [
        ("acc is not logged: it is []; allowed: A", "f1 is not logged: it is {}; allowed: A", True),
        ("acc is not logged: it is []; allowed: A", "acc is not logged: broken", False),
        ("log is ignored: it is 1; allowed: A", "resume is ignored: it is 1; allowed: A", False),
        ("init(id='a') is ignored", "init(id='b') is ignored", True),
        ("Video is not supported", "Html is not supported", False),
    ],
)
def test_messages_of_a_kind_differ_in_values(first: str, second: str, is_same: bool) -> None:
    """Messages of one kind differ in values and logged names, not in method or reason."""
    assert (kind_of(first) == kind_of(second)) is is_same


def test_a_late_refusal_is_reported_after_many_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A late rejection is printed after many of another kind; the end counts unprinted ones."""
    monkeypatch.chdir(tmp_path)
    watch = halfstep.watch(mode="offline", console=False, system=False)
    for number in range(50):
        value: Any = object()
        watch.log({f"metric {number}": value}, step=1)
    watch.log({"late": "x"}, step=-1)
    assert "its step is -1" in capsys.readouterr().err
    watch.finish()
    assert "45 more like: metric 0 is not logged" in capsys.readouterr().err
