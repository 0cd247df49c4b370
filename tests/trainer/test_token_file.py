"""Token files of a text: built once despite kills, for a text and a tokenizer."""

import os
import threading
import time
import tracemalloc

import numpy as np
import pytest

from trainer.recipes.corpus import read_pieces
from trainer.recipes.token_file import folder, tokens_of


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path / "data"))
    path = tmp_path / "texts"
    path.mkdir()
    (path / "a.txt").write_text("ab\n" * 40_000)
    (path / "b.jsonl").write_text('{"text": "c"}\n{"text": "d"}\n')
    return path


class Bytes:
    """A tokenizer with a token per byte and 0 after a document, which counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, pieces):
        self.calls += 1
        return [[*piece.text.encode(), *([0] if piece.is_last else [])] for piece in pieces]


def tokens(text, encode, made_by="bytes"):
    return tokens_of(lambda: read_pieces(text, "text", 2**30), encode, made_by)


def test_they_are_made_once_for_a_text_and_a_tokenizer(text):
    """Equal texts share a token file; another line, end or tokenizer has its own."""
    encode = Bytes()
    found = tokens(text, encode)
    assert bytes(found.astype(np.uint8)) == b"ab\n" * 40_000 + b"\0c\0d\0"
    assert isinstance(found, np.memmap)
    calls = encode.calls
    other = text.parent / "elsewhere"
    text.rename(other)
    assert np.array_equal(tokens(other, encode), found)
    assert encode.calls == calls
    tokens(other, encode, "words")
    (other / "b.jsonl").write_text('{"text": "cd"}\n')
    assert bytes(tokens(other, encode)[-3:].astype(np.uint8)) == b"cd\0"
    assert encode.calls == 3 * calls
    assert len(list(folder().glob("*.tokens"))) == 3
    (other / "b.jsonl").unlink()
    (other / "a.txt").write_text("")
    assert len(tokens(other, encode)) == 0


def test_an_interrupted_file_is_rebuilt(text):
    """A partial token file, or one of invalid text, is built again."""

    def broken(pieces):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens(text, broken)
    assert [each.suffix for each in folder().iterdir()] == [".lock"]
    assert len(tokens(text, Bytes())) == 120_005


def test_one_of_two_processes_builds_the_file(text):
    """Several processes that start at once build one token file."""
    encode, found = Bytes(), []
    threads = [
        threading.Thread(target=lambda: found.append(tokens(text, encode))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in found] == [120_005] * 4
    assert encode.calls == 1


def test_unread_notifications_are_deleted_after_a_month(text):
    """Token files unread for a month are deleted when another is written."""
    tokens(text, Bytes(), "old")
    [old] = folder().glob("*.tokens")
    tokens(text, Bytes(), "read")
    [read] = set(folder().glob("*.tokens")) - {old}
    for path in folder().iterdir():
        os.utime(path, (0, time.time() - 31 * 86_400))
    tokens(text, Bytes(), "read")
    tokens(text, Bytes(), "new")
    assert read.exists()
    assert not old.exists()
    assert len(list(folder().glob("*.lock"))) == 2


@pytest.mark.slow
def test_a_text_is_never_in_memory_as_a_whole(text):
    """Neither the whole text nor all its tokens are in memory at once."""
    lines = '{"text": "' + "a" * 1000 + '"}\n'
    (text / "b.jsonl").write_text(lines * 6_000)  # 6 MB, tokens of 24 MB
    tracemalloc.start()
    found = tokens(text, Bytes())
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) > 6_000_000
    assert peak < 12 * 2**20
