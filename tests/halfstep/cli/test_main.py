"""The front door: the `halfstep` command and what joins it."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from app.commands import STORAGE
from app.user_command import USER
from halfstep import __version__
from halfstep.cli import main
from halfstep.cli.alert_commands import ALERT
from halfstep.cli.commands import COMMANDS, RUN
from halfstep.cli.saved_commands import NOTE, PRESET, RETENTION
from halfstep.cli.sweep_commands import SWEEP
from halfstep.client import Client
from tests.site import halfstep
from trainer.commands import cli as recipe

#: Commands that serve until they are ended.
FOR_EVER = {"mcp", "placer", "server", "up", "worker"}
#: Commands of commands; one that is not here has no --json of its own, which is told below.
GROUPS = {
    "alert": [*ALERT],
    "note": [*NOTE],
    "preset": [*PRESET],
    "retention": [*RETENTION],
    "run": [*RUN],
    "sweep": [*SWEEP],
} | {
    name: [*typer.main.get_group(group).commands]
    for name, group in (("storage", STORAGE), ("user", USER), ("recipe", recipe))
}


def all_commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command that is installed and comes to an end."""
    installed = {point.name for point in entry_points(group=main.GROUP)}
    for name in sorted({*main.OWN, *installed} - FOR_EVER):
        yield from ((name, inner) for inner in GROUPS[name]) if name in GROUPS else [(name,)]


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


def test_every_command_of_the_client_is_offered() -> None:
    """The front door lists them without loading them."""
    assert tuple(COMMANDS) == main.OWN


def test_the_services_commands_are_known_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they need is told by the client alone."""
    points = entry_points(group=main.GROUP)
    ours = [each.name for each in points if each.dist and each.dist.name == "halfstep-service"]
    assert tuple(sorted(ours)) == main.SERVICE
    monkeypatch.setattr(main, "entry_points", lambda group: [])
    told = r"`recipe` .* in a clone of Halfstep, pip install \./halfstep '\.\[worker\]'"
    with pytest.raises(SystemExit, match=told):
        main.main(["recipe", "check", "mine.py"])


@pytest.mark.parametrize(
    "words", [["--sort", "-lr"], ["--sort=-lr"], ["--limit", "5", "--sort", "-lr", "status:failed"]]
)
def test_runs_are_sorted_downwards_by_a_word_with_a_dash(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """argparse takes such a word for an option; a real option behind --sort is one still."""
    asked: list[str] = []

    def run_page(_self: Client, _filter: str, *, sort: str, limit: int) -> dict[str, Any]:
        asked.append(sort)
        return {"runs": [], "notes": []}

    monkeypatch.setattr(Client, "run_page", run_page)
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "token")
    RUN["list"](words)
    assert asked == ["-lr"]
    with pytest.raises(SystemExit):
        RUN["list"](["--sort", "--limit", "5"])


def test_unknown_command_is_named() -> None:
    """A typing error ends in a sentence that lists what there is."""
    ended = halfstep("dwonload")
    assert ended.returncode == 2
    assert "'dwonload'" in ended.stderr
    assert "migrate" in ended.stderr


@pytest.mark.parametrize("words", [*all_commands()], ids=" ".join)
def test_every_command_has_json(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """But for those that go on for ever."""
    with pytest.raises(SystemExit, match="0"):
        main.main([*words, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("run show first", 2, "invalid int value: 'first'"),
        ("run shwo 1", 2, "invalid choice: 'shwo'"),
        ("run show 1", 1, "the server does not answer"),
        ("storage runs --limit 0", 2, "should be greater than or equal to 1"),
        ("storage prune --logs 1", 1, "--json: asks nobody; allowed: with --dry-run or --yes"),
        ("link bob", 1, "There is no installation here"),
        ("recipe remove away.py", 1, "away.py is not kept"),
    ],
)
def test_what_goes_wrong_is_json_where_that_is_asked_for(
    typed: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One object on stderr, and nothing on stdout; the exit code is the same as without."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "none")
    with pytest.raises(SystemExit) as ended:
        main.main([*typed.split(), "--json"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (code, "")
    assert message in json.loads(said.err)["error"]
