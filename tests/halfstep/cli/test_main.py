"""The root of the `halfstep` command, and rules that apply to every command."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from halfstep import __version__
from halfstep.cli import main
from halfstep.client import Client
from tests.marks import looped
from tests.site import halfstep, type_command

#: Commands that serve until they are ended.
FOR_EVER = {"mcp", "placer", "server", "show", "up", "worker"}


def all_commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of each installed command, with the subcommands in place of a group."""
    installed = {point.name for point in entry_points(group=main.GROUP)}
    for name in sorted({*main.CLIENT, *installed}):
        found = main.command(name)
        inner = getattr(found, "commands", None)
        yield from [(name,)] if inner is None else ((name, each) for each in inner)


def found_command(words: tuple[str, ...]) -> Any:
    """Return the command with these words."""
    command = main.command(words[0])
    return command.commands[words[1]] if words[1:] else command


def install_command(folder: Path, command: str, code: str) -> dict[str, str]:
    """Install a package that adds a command; return the environment with it."""
    metadata = folder / "guest-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[halfstep.commands]\n{command}\n")
    (folder / "guest.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def help_of(*words: str, **environment: str) -> str:
    """Return the output of --help, without frames and line breaks."""
    return re.sub(r"[\s│]+", " ", halfstep(*words, **environment).stdout)


@pytest.mark.slow
def test_help_lists_every_command_with_its_first_line() -> None:
    """`halfstep` without arguments lists the installed commands with their first help lines."""
    for words in ((), ("--help",)):
        text = help_of(*words)
        assert "up Start server and worker on this machine" in text
        assert "worker Start a worker: it offers" in text
        assert "recipe Check, plan, train and register your own recipes." in text
        assert "top Show all running runs" in text


def test_help_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands at every level accept -h."""
    for words in (["-h"], ["run", "-h"], ["run", "show", "-h"], ["storage", "prune", "-h"]):
        assert type_command(*words) == 0
        assert "Usage: halfstep" in capsys.readouterr().out


@pytest.mark.slow
def test_version_is_printed() -> None:
    """--version prints the version of the wheel."""
    assert halfstep("--version").stdout.strip() == __version__


@pytest.mark.extended
@pytest.mark.slow
def test_another_package_adds_a_command(tmp_path: Path) -> None:
    """A package's entry point is called with all arguments after its name."""
    code = 'def greet(words):\n    """Say hello."""\n    print("hello", *words)\n'
    environment = install_command(tmp_path, "greet = guest:greet", code)
    typed = ("greet", "Ada", "--loud", "--", "--help")
    assert halfstep(*typed, **environment).stdout == "hello Ada --loud -- --help\n"
    assert "greet Say hello." in help_of("--help", **environment)


@pytest.mark.extended
def test_another_package_adds_a_typer_application(tmp_path: Path) -> None:
    """A package's typer application becomes a group named like its entry point."""
    code = (
        "import typer\napp = typer.Typer(help='Greetings.')\n"
        "@app.command()\ndef hello(name: str):\n    print('hello', name)\n"
        "@app.command()\ndef bye():\n    raise typer.Exit(3)\n"
    )
    environment = install_command(tmp_path, "greet = guest:app", code)
    assert halfstep("greet", "hello", "Ada", **environment).stdout == "hello Ada\n"
    assert halfstep("greet", "bye", **environment).returncode == 3
    assert "greet Greetings." in help_of("--help", **environment)


@pytest.mark.extended
def test_a_broken_package_hides_no_command(tmp_path: Path) -> None:
    """A package that cannot be imported is listed with its error, next to the other commands."""
    environment = install_command(tmp_path, "greet = guest:greet", "1 / 0")
    shown = help_of("--help", **environment)
    assert "cannot be loaded: ZeroDivisionError" in shown
    assert "Print a link" in shown
    assert "ZeroDivisionError" in halfstep("greet", **environment).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "missing"),
    [
        ("guest:moved", "module 'guest' has no attribute 'moved'"),
        ("guest:Greeter.moved", "type object 'Greeter' has no attribute 'moved'"),
        ("guest.moved:greet", "No module named 'guest.moved'; 'guest' is not a package"),
        ("moved.guest:greet", "No module named 'moved'"),
    ],
)
def test_a_command_that_moved_is_installed_again(tmp_path: Path, point: str, missing: str) -> None:
    """An installation that names a missing module or attribute gets an error without a traceback,
    and so does metadata that an earlier build left in the source folder, which pip does not renew.
    """
    code = "class Greeter:\n    pass\n"
    environment = install_command(tmp_path, f"greet = {point}", code)
    result = "the installation of guest does not match its sources; install it again"
    for expected in (result, f"{tmp_path}/guest.egg-info does not match its sources; delete it"):
        ended = halfstep("greet", "Ada", **environment)
        assert ended.returncode == 1
        assert ended.stderr == f"halfstep: `greet` cannot be loaded ({missing}): {expected}\n"
        if expected == result:
            (tmp_path / "guest-1.0.dist-info").rename(tmp_path / "guest.egg-info")
            (tmp_path / "guest.egg-info/METADATA").rename(tmp_path / "guest.egg-info/PKG-INFO")


@pytest.mark.extended
@pytest.mark.parametrize("code", ["import sys\nsys.absent", "import json\njson.absent"])
def test_an_error_in_a_packages_own_code_keeps_its_traceback(tmp_path: Path, code: str) -> None:
    """An attribute missing within a package's own code is an error with a traceback."""
    ended = halfstep("greet", **install_command(tmp_path, "greet = guest:greet", code))
    assert "Traceback" in ended.stderr
    assert "AttributeError" in ended.stderr


def test_the_services_commands_are_known_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the service the client's help names the package of the service's commands."""
    points = entry_points(group=main.GROUP)
    ours = [each.name for each in points if each.dist and each.dist.name == "halfstep-service"]
    assert tuple(sorted(ours)) == main.SERVICE
    monkeypatch.setattr(main, "root", lambda: typer.main.get_group(main.APP))
    monkeypatch.setattr(main.Root, "_installed", {})
    result = r"`recipe` .* in a clone of Halfstep, pip install \./halfstep '\.\[worker\]'"
    assert re.search(result, str(type_command("recipe", "check", "mine.py")))


@looped("words", [*all_commands()])
def test_everything_has_help_text(words: tuple[str, ...]) -> None:
    """Every command, argument and option has a help text; those of options are no sentences."""
    command = found_command(words)
    assert command.help
    assert command.help[0].isupper()
    assert "[" not in command.help  # which rich would take for its markup
    for parameter in command.params:
        assert parameter.help, f"{' '.join(words)}: {parameter.name} has no help text"
        assert not parameter.help.endswith("."), parameter.name
        assert "[" not in parameter.help, parameter.name
        if parameter.param_type_name == "argument":
            assert parameter.metavar == parameter.metavar.upper(), parameter.name


@looped("words", [each for each in all_commands() if each[0] not in FOR_EVER])
def test_every_command_has_json(words: tuple[str, ...]) -> None:
    """Every command except servers has --json."""
    assert any("--json" in parameter.opts for parameter in found_command(words).params)


@pytest.mark.parametrize(
    "words", [["--sort", "-lr"], ["--sort=-lr"], ["--limit", "5", "--sort", "-lr", "status:failed"]]
)
def test_runs_are_sorted_in_descending_order_by_a_word_with_a_dash(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """A sort key with a leading dash is no option after --sort, but a real option still is."""
    asked: list[str] = []

    def run_page(_self: Client, _filter: str, *, sort: str, limit: int) -> dict[str, Any]:
        asked.append(sort)
        return {"runs": [], "notes": [], "total": 0}

    monkeypatch.setattr(Client, "run_page", run_page)
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "token")
    assert type_command("run", "list", *words) == 0
    assert asked == ["-lr"]
    assert type_command("run", "list", "--sort", "--limit", "5") == 2


@pytest.mark.slow
def test_unknown_command_is_named() -> None:
    """An unknown command is a usage error that lists the commands, with a suggestion."""
    ended = halfstep("dwonload")
    assert ended.returncode == 2
    assert "'dwonload'; did you mean download?" in ended.stderr
    assert "migrate" in ended.stderr


@looped(
    "typed, message",
    [
        ("run show", "RUN is missing"),
        ("run show first", "RUN: 'first' is not a whole number"),
        ("run show 1 2", "got unexpected extra argument(s) (2)"),
        ("run show 1 --jsno", "no such option: --jsno"),
        ("run shwo 1", "there is no command 'shwo'; did you mean show? allowed: submit, list,"),
        ("submit digits --precision fp17", "--precision: 'fp17' is not valid; allowed: fp16, "),
        ("submit --command 'a {lr}'", "{lr} needs a value: --param lr=VALUE"),
        (
            "sweep begin --command 'a {lr} {wd}' --search wd=1,2",
            "{lr} needs a value: --param lr=VALUE",
        ),
        ("top --interval 0", "--interval: 0 is not valid; allowed: at least 0.2"),
        ("export tensorflow 1 x", "TARGET: 'tensorflow' is not valid; allowed: tensorboard, ml"),
    ],
)
def test_a_typing_error_is_one_sentence(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error prints one line on stderr with the command for help, and exits with 2."""
    assert type_command(*shlex.split(typed)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: {message}")
    assert line.endswith("--help`)")


def test_a_group_without_a_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A group without a command prints its help with exit code 2."""
    assert type_command("run") == 2
    assert "follow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("run show first", 2, "RUN: 'first' is not a whole number"),
        ("run shwo 1", 2, "there is no command 'shwo'"),
        ("run show 1", 1, "the server does not answer"),
        ("projects", 1, "the server does not answer"),
        ("workers", 1, "the server does not answer"),
        ("storage runs --limit 0", 2, "--limit: 0 is not valid; allowed: 1 to 1000"),
        (
            "storage prune --logs 1",
            1,
            "--json: cannot ask for confirmation without a terminal; add --dry-run or --yes",
        ),
        ("link bob", 1, "There is no installation here"),
        ("recipe remove away.py", 1, "away.py is not "),
    ],
)
def test_errors_are_json_if_requested(
    typed: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --json an error is one object on stderr, with the usual exit code."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    monkeypatch.setenv("HALFSTEP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFSTEP_TOKEN", "none")
    assert type_command(*typed.split(), "--json") == code
    said = capsys.readouterr()
    assert said.out == ""
    assert message in json.loads(said.err)["error"]


@pytest.mark.slow
def test_a_list_of_runs_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Listing runs imports neither numpy nor torch nor pydantic, so that it starts quickly."""
    code = """
import sys
from halfstep.cli.main import main
from halfstep.client import Client
Client.run_page = lambda *_, **__: {"runs": [], "notes": [], "total": 0}
main(["run", "list", "--limit", "5"])
print(*{name.partition(".")[0] for name in sys.modules})
"""
    environment = {"HALFSTEP_TOKEN": "token", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert {"typer", "httpx2"} <= loaded
    assert not loaded & {"numpy", "torch", "pydantic", "sqlalchemy", "fastapi", "mcp"}
