"""Environment of an attempt, recorded from real files and a real git."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from db.tables import Worker
from halfstep.telemetry.events import SOURCE_BYTES
from halfstep.telemetry.source_state import read_state
from worker.attempts.environment import Started, describe, try_describe

DEVICES = [{"index": i, "name": f"GPU {i}"} for i in range(3)]
WORKER = Worker(name="w", host="h", devices=DEVICES, versions={"torch": "2"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a committed recipe."""
    (tmp_path / "recipe.py").write_text("LR = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(tmp_path, *words)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder)]
    return subprocess.run(
        ["git", *options, *words], check=True, capture_output=True, text=True
    ).stdout


def report(folder: Path, **more: Any) -> tuple[dict[str, Any], Any]:
    read = partial(read_state, folder / "recipe.py", folder)
    started = Started(["python", "recipe.py"], str(folder), read, **more)
    return describe(started, WORKER, [0, 2])


def test_a_clean_and_a_changed_folder(folder: Path) -> None:
    """The environment has the folder's commit, changes, untracked files and diff."""
    content, texts = report(folder)
    assert content["git"]["commit"] == git(folder, "rev-parse", "HEAD").strip()
    assert (content["git"]["is_dirty"], texts[:2]) == (False, ("LR = 1\n", None))
    assert [each["index"] for each in content["devices"]] == [0, 2]
    (folder / "recipe.py").write_text("LR = 2\n")
    (folder / "néw.py").write_text("")
    content, texts = report(folder)
    assert content["git"]["is_dirty"]
    assert content["git"]["untracked"] == ["néw.py"]
    added = "diff --git a/néw.py b/néw.py\nnew file mode 100644\n"
    assert texts.diff.endswith(f"-LR = 1\n+LR = 2\n{added}")


def test_an_index_that_is_split(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The shared part of a split index is found, also in a worktree."""
    beside = tmp_path_factory.mktemp("beside") / "tree"
    git(folder, "worktree", "add", str(beside))
    for tree in (folder, beside):
        git(tree, "update-index", "--split-index")
        assert report(tree)[0]["git"]["is_dirty"] is False
        (tree / "recipe.py").write_text("LR = 2\n")
        assert report(tree)[1].diff.endswith("-LR = 1\n+LR = 2\n")


def test_what_git_cannot_say(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository without a commit is reported; without git nothing is recorded or fails."""
    (folder / ".git").rename(folder / "gone")
    assert report(folder)[0]["git"] is None
    git(folder, "init", "-q")
    assert report(folder)[0]["git"]["error"].startswith("fatal: ")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert report(folder)[0]["git"] is None


def test_neither_secrets_nor_more_than_is_kept_are_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded environment has no secrets, and no diff of a gigabyte."""
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", "postgresql://u:geheimnis@db/x")
    text = 'api_key = "abcdefgh12"\nos.environ["HF_TOKEN"] = "hf_abcdefgh"\nurl = "https://u:p@h"\n'
    text += 'db = "postgresql://u:geheimnis@db/x"\npad_token = "<|endoftext|>"\nx = "hidden-one"\n'
    (folder / "recipe.py").write_text(text)
    content, texts = report(folder, hidden=["hidden-one"])
    for kept in (texts.source, texts.diff):
        for secret in ("abcdefgh12", "hf_abcdefgh", "u:p@", "geheimnis", "hidden-one"):
            assert secret not in kept
        assert 'pad_token = "<|endoftext|>"' in kept
    (folder / "recipe.py").write_text("# a long line\n" * SOURCE_BYTES)
    content, texts = report(folder)
    assert content["git"]["is_cut"]
    assert content["file"]["is_cut"]
    assert len(texts.source) == SOURCE_BYTES


def test_what_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe instead of a script is not read, and an internal error costs no run."""
    os.mkfifo(tmp_path / "recipe.py")
    content, texts = report(tmp_path)
    assert (content["file"], texts.source) == (None, None)
    started = Started(["python"], str(tmp_path), None)  # type: ignore[arg-type]
    assert try_describe(started, WORKER, [0]) is None
    assert "cannot be described" in caplog.text


def test_a_repository_is_compared_by_its_own_settings(folder: Path) -> None:
    """The repository's own exclusions and line endings apply, also in worktrees and with
    SHA-256.
    """
    git(folder, "config", "core.fileMode", "false")
    (folder / ".git" / "info" / "exclude").write_text("*.out\n")
    (folder / "a.out").write_text("")
    (folder / "recipe.py").chmod(0o755)
    content, _texts = report(folder)
    assert (content["git"]["is_dirty"], content["git"]["untracked"]) == (False, [])
    beside = folder.parent / "beside"
    git(folder, "worktree", "add", "-q", str(beside))
    (beside / "recipe.py").write_text("LR = 3\n")
    content, texts = report(beside)
    assert content["git"]["commit"] == git(folder, "rev-parse", "HEAD").strip()
    assert texts.diff.endswith("-LR = 1\n+LR = 3\n")
    hashed = folder.parent / "hashed"
    hashed.mkdir()
    (hashed / "recipe.py").write_text("LR = 1\n")
    git(hashed, "init", "-q", "--object-format=sha256")
    git(hashed, "add", ".")
    git(hashed, "commit", "-qm", "first")
    (hashed / "recipe.py").write_text("LR = 2\n")
    content, texts = report(hashed)
    assert len(content["git"]["commit"]) == 64
    assert texts.diff.endswith("-LR = 1\n+LR = 2\n")
