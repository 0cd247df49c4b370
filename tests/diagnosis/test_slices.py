"""Slices of the corpus with limited time."""

from pathlib import Path

import pytest

from tests.diagnosis import slices
from tests.marks import extended, looped

TESTS = """
import time
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_skipped(): pass
def test_hangs(): time.sleep(3600)
def test_is_not_reached(): pass
"""


def run(folder: Path, *arguments: str) -> slices.Slice:
    """Run the tests above separately."""
    file = folder / "test_it.py"
    file.write_text(TESTS)
    plugins = ("cacheprovider", "kmock", "schemathesis")
    options = (*(f"-pno:{name}" for name in plugins), "-c/dev/null", f"--rootdir={folder}")
    return slices.run([str(file), *options, *arguments], seconds=300)


def test_a_slice_that_takes_too_long_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice that exceeds its time is killed; its outcomes so far are reported."""
    times = iter([0.0] * 5)  # at the start, and before the collection and each outcome
    monkeypatch.setattr(slices, "monotonic", lambda: next(times, 300.0))
    result = run(tmp_path)
    assert {each.partition("::")[2]: how for each, how in result.outcomes.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skipped": "skipped",
    }
    assert (len(result.tests), result.exit_code) == (5, None)
    assert not result.has_passed
    assert result.row.startswith("5 | 1 | 1 | 1 | 2 | ")
    assert "assert 1 == 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "has_passed"),
    [("test_fails", False), ("missing", True), *extended([("test_passes", True)])],
)
def test_failures_alone_fail_a_slice(tmp_path: Path, words: str, has_passed: bool) -> None:
    """A slice without tests passes, since there may be more slices than loops."""
    assert run(tmp_path, "-k", words).has_passed is has_passed


def test_slices_have_each_loop_once() -> None:
    for place in range(20):
        assert sum(slices.has_place(f"{number}/3", place) for number in (1, 2, 3)) == 1


@looped("part", ["", "0/3", "4/3", "3", "1/2/3"])
def test_other_words_for_a_slice_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match="must be k/N"):
        slices.numbers(part)
