"""Reads text corpora: plain text, or JSONL with a text per line; a file, or a folder of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.recipe import ConfigError, data_path

SUFFIXES = (".txt", ".md", ".jsonl")  # of files read in a folder
PIECE_CHARACTERS = 2**16  # or a line, if it is longer


@dataclass(frozen=True)
class Piece:
    """Some lines of a document."""

    text: str
    is_last: bool  # they end it


def read_pieces(path: Path, field: str, max_bytes: int) -> Iterator[Piece]:
    """Yield documents in order of file names, until max_bytes of text have been read.

    field: key of the text in a line of JSONL.  Raises ConfigError for invalid text, with file and
    line.
    """
    left = max_bytes
    for file in _files(path):
        data_path(file, "recipe.text")  # a link in the folder may lead anywhere
        pieces = _lines_of_json(file, field) if file.suffix == ".jsonl" else _pieces(file)
        try:
            for piece in pieces:
                yield piece
                left -= len(piece.text.encode(errors="replace"))
                if left <= 0:
                    return
        except UnicodeDecodeError as error:
            raise ConfigError(f"recipe.text: {file} is not UTF-8 text: {error}") from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(
            f"recipe.text is {str(path)!r}: there is no text on this worker; name a file, or a "
            f"folder with files ending in {', '.join(SUFFIXES)}"
        )
    return files


def _pieces(file: Path) -> Iterator[Piece]:
    with file.open(encoding="utf-8") as opened:
        lines = opened.readlines(PIECE_CHARACTERS)
        while lines:
            later = opened.readlines(PIECE_CHARACTERS)
            yield Piece("".join(lines), is_last=not later)
            lines = later


def _lines_of_json(file: Path, field: str) -> Iterator[Piece]:
    with file.open(encoding="utf-8") as opened:
        for number, line in enumerate(opened, start=1):
            if line.strip():
                yield Piece(_text_of(line, field, f"{file}, line {number}"), is_last=True)


def _text_of(line: str, field: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"recipe.text: {where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"recipe.text: {where} is a {type(value).__name__}, not an object, "
            f'such as {{"{field}": "…"}}'
        )
    if not isinstance(text := value.get(field), str):
        has = ", ".join(map(repr, value)) or "no fields"
        raise ConfigError(
            f"recipe.text: {where} has no text in the field {field!r} (recipe.field); it has {has}"
        )
    return text
