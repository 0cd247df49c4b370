"""Commands in the documents exist with their options, and journeys run those of operators."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from halfstep.cli import main
from tests.halfstep.cli.test_main import found_command

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: `halfstep …` within a sentence, and a line of a shell's block.
INLINE = re.compile(r"`((?:[A-Z_]+=\S* )*halfstep [a-z][^`]*)`")
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What ends a command in a shell.
ENDS = re.compile(r"\s(?:#|&&|\|\||\||;|>|2>)(?:\s|$)|;")


def list_documented() -> Iterator[tuple[str, str]]:
    """Yield each document's name and the commands in it."""
    for path in DOCUMENTS:
        if "decisions" in path.parts:
            continue
        text = path.read_text().replace("\\\n", " ")  # continued lines
        lines = [line.strip() for block in BLOCK.findall(text) for line in block.splitlines()]
        found = [line for line in lines if re.match(r"(?:[A-Z_]+=\S* )*halfstep [a-z]", line)]
        for line in dict.fromkeys([*INLINE.findall(text), *found]):
            yield str(path.relative_to(ROOT)), line


def forms(line: str) -> Iterator[list[str]]:
    """Yield the words after `halfstep` for each alternative, such as list|add."""
    command = ENDS.split(re.sub(r"\[([^\]]*)\]", r"\1", line.replace("…", "")))[0]
    words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S* )*halfstep ", "", command))
    if "--help" in words:
        words = words[: words.index("--help")]
    for at, word in enumerate(words):
        if re.fullmatch(r"[a-z-]+(?:\|[a-z-]+)+", word):
            for each in word.split("|"):
                yield [*words[:at], each, *words[at + 1 :]]
            return
    yield words


def fault(words: list[str]) -> str | None:
    """Return the error of a command, if any; a group without a command has none."""
    try:
        command = found_command(tuple(words[:1]))
        depth = 1
        while getattr(command, "commands", None) and words[depth:]:
            command, depth = command.commands[words[depth]], depth + 1
        if not getattr(command, "commands", None):
            root = main.root()
            parent = root.context_class(root, **root.context_settings)
            context = command.context_class(command, parent=parent, **command.context_settings)
            command.make_parser(context).parse_args(words[depth:])
    except (KeyError, AttributeError):
        return "there is no such command"
    except Exception as error:  # typer brings its own click, whose errors have no public name
        return str(getattr(error, "message", error))
    return None


def test_every_documented_command_exists_with_its_options() -> None:
    """Every command in the documents exists with its options, also within sentences."""
    found = list(list_documented())
    assert len(found) > 120
    wrong = [
        f"{name}: {line}: {text}"
        for name, line in found
        for words in forms(line)
        if (text := fault(words))
    ]
    assert wrong == []


def test_every_client_command_is_in_the_reference() -> None:
    """The reference lists all client commands, and short forms such as `halfstep submit`."""
    text = (ROOT / "docs/reference/client.md").read_text()
    assert [name for name in main.CLIENT if not re.search(rf"halfstep {name}\b", text)] == []
