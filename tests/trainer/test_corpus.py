import json

import pytest

from halfstep.run_config import ConfigError
from trainer.recipes import corpus
from trainer.recipes.corpus import read_pieces


def texts(path, field="text", max_bytes=2**20):
    """Return the pieces of a text, and whether a document ends at each."""
    return [(piece.text, piece.is_last) for piece in read_pieces(path, field, max_bytes)]


def test_a_text_is_read_in_pieces_of_lines(tmp_path, monkeypatch):
    """Pieces of a text end at lines, lose nothing, and only the last one ends the document."""
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 8)
    (tmp_path / "a.txt").write_text("one two\nthree\nfour\nfive")
    pieces = texts(tmp_path / "a.txt")
    assert "".join(text for text, _ in pieces) == "one two\nthree\nfour\nfive"
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1


def test_a_folder_is_read_in_order_of_its_names(tmp_path):
    """Text and JSONL files of a folder are read in order of their names, and others ignored."""
    (tmp_path / "b.jsonl").write_text('{"text": "second", "id": 1}\n\n{"text": "third"}\n')
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.png").write_bytes(b"\xff")
    assert texts(tmp_path) == [("first", True), ("second", True), ("third", True)]
    assert texts(tmp_path, max_bytes=7) == [("first", True), ("second", True)]
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "é"}))
    assert texts(tmp_path / "b.jsonl", field="body") == [("é", True)]


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("[1]", r"b.jsonl, line 3 is a list, not an object, such as {\"text\""),
        ("{", r"b.jsonl, line 3 is not JSON: "),
        (
            '{"prompt": "x"}',
            r"line 3 has no text in the field 'text' \(recipe.field\); it has 'prompt'",
        ),
        ('{"text": 7}', r"line 3 has no text in the field 'text'"),
        ("{}", r"line 3 has no text in the field 'text' .*; it has no fields"),
    ],
)
def test_a_line_that_has_no_text_is_reported_by_its_number(tmp_path, line, reported):
    """A line without a text is reported with file, number and keys; empty lines are counted."""
    (tmp_path / "b.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=reported):
        texts(tmp_path)


def test_binary_content_is_reported(tmp_path):
    """A corpus file that is missing or not UTF-8 is reported."""
    with pytest.raises(ConfigError, match="there is no text on this worker"):
        texts(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a.txt is not UTF-8 text"):
        texts(tmp_path)
