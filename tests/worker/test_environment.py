"""What an attempt is started in, by real files and a real git."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from db.environments import LONGEST_BYTES
from db.tables import Worker
from worker.environment import Started, describe, described

DEVICES = [{"index": i, "name": f"GPU {i}"} for i in range(3)]
WORKER = Worker(name="w", host="h", devices=DEVICES, versions={"torch": "2"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a recipe in it that is committed."""
    (tmp_path / "recipe.py").write_text("LR = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(tmp_path, *words)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder)]
    return subprocess.run(
        ["git", *options, *words], check=True, capture_output=True, text=True
    ).stdout


def told(folder: Path, **more: Any) -> tuple[dict[str, Any], Any]:
    started = Started(["python", "recipe.py"], folder, folder / "recipe.py", **more)
    return describe(started, WORKER, [0, 2])


def test_a_clean_and_a_changed_folder(folder: Path) -> None:
    """Commit, whether something is changed or not known to git, and the diff, of this folder."""
    content, texts = told(folder)
    assert content["git"]["commit"] == git(folder, "rev-parse", "HEAD").strip()
    assert (content["git"]["is_dirty"], texts) == (False, ("LR = 1\n", None))
    assert [each["index"] for each in content["devices"]] == [0, 2]
    (folder / "recipe.py").write_text("LR = 2\n")
    (folder / "néw.py").write_text("")
    content, texts = told(folder)
    assert content["git"]["is_dirty"]
    assert content["git"]["untracked"] == ["néw.py"]
    assert texts.diff.endswith("-LR = 1\n+LR = 2\n")


def test_what_git_cannot_say(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository without a commit says why; no repository, or no git, is none; neither fails."""
    (folder / ".git").rename(folder / "gone")
    assert told(folder)[0]["git"] is None
    git(folder, "init", "-q")
    assert told(folder)[0]["git"]["error"].startswith("fatal: ")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert told(folder)[0]["git"] is None


def test_neither_secrets_nor_more_than_is_kept_are_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the source, not in the diff, not in the command; a diff of a gigabyte is not read."""
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", "postgresql://u:geheimnis@db/x")
    text = 'api_key = "abcdefgh12"\nos.environ["HF_TOKEN"] = "hf_abcdefgh"\nurl = "https://u:p@h"\n'
    text += 'db = "postgresql://u:geheimnis@db/x"\npad_token = "<|endoftext|>"\nx = "hidden-one"\n'
    (folder / "recipe.py").write_text(text)
    content, texts = told(folder, hidden=["hidden-one"])
    for kept in (texts.source, texts.diff):
        for secret in ("abcdefgh12", "hf_abcdefgh", "u:p@", "geheimnis", "hidden-one"):
            assert secret not in kept
        assert 'pad_token = "<|endoftext|>"' in kept
    (folder / "recipe.py").write_text("# a long line\n" * LONGEST_BYTES)
    content, texts = told(folder)
    assert content["git"]["is_cut"]
    assert content["file"]["is_cut"]
    assert len(texts.source) == LONGEST_BYTES


def test_what_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe in a script's place is not waited for, and a fault of ours costs no run."""
    os.mkfifo(tmp_path / "recipe.py")
    content, texts = told(tmp_path)
    assert (content["file"], texts.source) == (None, None)
    started = Started(["python"], tmp_path, "x")  # type: ignore[arg-type]
    assert described(started, WORKER, [0]) is None
    assert "cannot be told" in caplog.text
