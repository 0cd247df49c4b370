"""The front door: the `halfstep` command and what joins it."""

import re
from pathlib import Path

from halfstep import __version__
from tests.site import halfstep


def joined(folder: Path, command: str, code: str) -> dict[str, str]:
    """Install a package beside ours that adds a command; return the environment that has it."""
    metadata = folder / "guest-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[halfstep.commands]\n{command}\n")
    (folder / "guest.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_help_lists_every_command_with_its_first_line() -> None:
    """`halfstep` alone explains what is installed."""
    for words in ((), ("--help",)):
        text = re.sub(r"\s+", " ", halfstep(*words).stdout)
        assert "up Start server and worker on this machine" in text
        assert "worker Start a worker alone" in text
        assert "recipe Recipes of your own" in text


def test_version_is_told() -> None:
    """The version is the wheel's."""
    assert halfstep("--version").stdout.strip() == __version__


def test_another_package_adds_a_command(tmp_path: Path) -> None:
    """An entry point of the group is called with the words after its name."""
    code = 'def greet(words):\n    """Say hello."""\n    print("hello", *words)\n'
    environment = joined(tmp_path, "greet = guest:greet", code)
    assert halfstep("greet", "Ada", "--loud", **environment).stdout == "hello Ada --loud\n"
    assert "Say hello." in halfstep("--help", **environment).stdout


def test_a_broken_package_hides_no_command(tmp_path: Path) -> None:
    """Its line says what it raises; the others are there."""
    environment = joined(tmp_path, "greet = guest:greet", "1 / 0")
    shown = halfstep("--help", **environment)
    assert "cannot be loaded: ZeroDivisionError" in re.sub(r"\s+", " ", shown.stdout)
    assert "Print a link" in shown.stdout


def test_unknown_command_is_named() -> None:
    """A typing error ends in a sentence that lists what there is."""
    ended = halfstep("dwonload")
    assert ended.returncode == 2
    assert "'dwonload'" in ended.stderr
    assert "migrate" in ended.stderr
