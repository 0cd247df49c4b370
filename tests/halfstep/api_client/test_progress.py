"""The progress bar on stderr."""

import sys

import pytest

from halfstep.api_client.progress import Progress


def test_a_terminal_sees_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar in a terminal has percentage and figures, and is removed at the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("run 1", in_bytes=True) as result:
        result(3 * 2**20, 4 * 2**20)
        result(2**22, 2**22)
    drawn = capsys.readouterr().err.split("\r\033[2K")
    assert "run 1" in drawn[1]
    assert " 75%  3 MiB of 4 MiB" in drawn[1]
    assert "100%" in drawn[2]
    assert drawn[-1] == ""


def test_other_outputs_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Output that is no terminal contains no progress bar."""
    with Progress("run 1") as result:
        result(1, 2)
    assert capsys.readouterr().err == ""
