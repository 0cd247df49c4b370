"""Git state, patch and packages of a script, from real repositories."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep.telemetry import source_state
from halfstep.telemetry.events import SOURCE_BYTES
from halfstep.telemetry.source_state import read_state, redact, requirements, without_credentials
from tests.marks import looped


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
    argv = ["git", *options, "-C", str(folder), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and an ignored file."""
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "train.py").write_text("LR = 1\n")
    (folder / ".gitignore").write_text("*.log\nrunes/\n")
    for words in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "first"]):
        git(folder, *words)
    return folder


def state_of(folder: Path, **named: Any) -> Any:
    state = read_state(None, folder, **named)
    assert state.git is not None
    return state.git, state.diff


def test_the_patch_brings_all_code_back(repository: Path, tmp_path: Path) -> None:
    """A patch restores changed, deleted, binary, added and untracked files, but no ignored ones."""
    (repository / "gone.py").write_text("x = 1\n")
    (repository / "data.bin").write_bytes(bytes(range(256)))
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository / "gone.py").unlink()
    (repository / "data.bin").write_bytes(bytes(reversed(range(256))))
    (repository / "train.py").write_text("LR = 2")
    sub = repository / "söb dir"
    sub.mkdir()
    (sub / "new model.py").write_text("x = 1\ny = 2")
    (sub / "empty.py").write_text("")
    (sub / "run.sh").write_text("python train.py\n")
    (sub / "run.sh").chmod(0o755)
    (repository / "out.log").write_text("no")
    (repository / "runes").mkdir()
    (repository / "runes" / "x.py").write_text("no")
    (repository / "weights.bin").write_bytes(b"\0" * 100)
    found, diff = state_of(sub, is_trusted=False)
    assert (found.branch, found.folder) == ("main", "söb dir/")
    assert (found.remote, found.is_pushed) == ("", None)
    assert found.changed == ["data.bin", "gone.py", "train.py"]
    assert found.untracked == ['"söb dir/"', "weights.bin"]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "patch").write_text(diff)
    git(clone, "apply", str(tmp_path / "patch"))
    names = {path.relative_to(clone).as_posix() for path in clone.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith(".git/")} == {
        *(".gitignore", "train.py", "data.bin"),
        *("söb dir/new model.py", "söb dir/empty.py", "söb dir/run.sh"),
    }
    for name in ("train.py", "data.bin", "söb dir/new model.py", "söb dir/run.sh"):
        assert (clone / name).read_bytes() == (repository / name).read_bytes()
    assert os.access(clone / "söb dir" / "run.sh", os.X_OK)


def test_secrets_are_neither_in_the_patch_nor_in_the_remote(repository: Path) -> None:
    """Files named like secrets are left out of the patch, and hidden texts are noted."""
    (repository / "secrets.yaml").write_text("a: 1")
    (repository / "new.py").write_text('token = "abcdefgh123"\n')
    git(repository, "remote", "add", "origin", "https://me:geheim@host/a/b.git?private_token=x")
    state = redact(read_state(None, repository))
    assert state.git is not None
    assert state.git.remote == "https://host/a/b.git"
    assert (state.git.is_redacted, state.git.is_pushed) == (True, False)
    assert "abcdefgh123" not in (state.diff or "")
    assert "secrets.yaml" not in (state.diff or "")
    assert "secrets.yaml" in state.git.untracked


@looped(
    "url, shown",
    [
        ("https://ghp_x@github.com/a/b", "https://github.com/a/b"),
        ("ssh://git:pw@host:22/a", "ssh://git@host:22/a"),
        ("ssh://git@host/a", "ssh://git@host/a"),
        ("git@github.com:a/b.git", "git@github.com:a/b.git"),
        ("/srv/git/a.git", "/srv/git/a.git"),
    ],
)
def test_credentials_of_a_url(url: str, shown: str) -> None:
    """User and password of an HTTP URL are removed; an SSH user is kept."""
    assert without_credentials(url) == shown


def test_a_patch_that_is_too_long_is_of_whole_files(repository: Path, tmp_path: Path) -> None:
    """A patch that is too long is cut between files, so that it can be applied."""
    for name in ("a.py", "b.py", "z.py"):
        (repository / name).write_text("")
    git(repository, "add", ".")
    (repository / "a.py").write_text("x = 1\n")
    (repository / "b.py").write_text("y = 1\n" * SOURCE_BYTES)
    found, diff = state_of(repository)
    assert found.is_cut
    assert "a/a.py" in diff
    assert "a/b.py" not in diff


def test_a_detached_head_a_worktree_and_a_submodule(repository: Path, tmp_path: Path) -> None:
    """Detached heads, worktrees and submodules have their own commit; inner changes are ignored."""
    commit = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    found, _ = state_of(tmp_path / "tree")
    assert (found.commit, found.branch) == (commit, "")
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "--quiet", "add", str(repository), "inner")
    git(outer, "commit", "-qm", "with a submodule")
    (outer / "inner" / "train.py").write_text("LR = 3\n")
    found, diff = state_of(outer)
    assert (found.is_dirty, diff) == (False, None)
    found, diff = state_of(outer / "inner")
    assert (found.commit, found.is_dirty) == (commit, True)


def test_a_bare_clone_and_a_repository_without_a_commit(repository: Path, tmp_path: Path) -> None:
    """A bare clone and a repository without a commit are recorded in part, with git's reason."""
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(repository), str(bare))
    found, diff = state_of(bare)
    assert found.commit == git(repository, "rev-parse", "HEAD").strip()
    assert "work tree" in (found.error or "")
    assert diff is None
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    found, _ = state_of(tmp_path / "empty")
    assert (found.commit, bool(found.error)) == ("", True)


def test_the_repository_of_the_script_is_preferred(repository: Path, tmp_path: Path) -> None:
    """The script's repository is recorded, or else that of the working folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found, _ = state_of(elsewhere, script_folder=repository)
    assert (found.branch, found.folder) == ("main", "")
    found, _ = state_of(repository, script_folder=elsewhere)
    assert found.branch == "main"
    assert read_state(None, elsewhere).git is None


def test_nothing_of_a_repository_is_run(repository: Path, tmp_path: Path) -> None:
    """Recording runs no external diff, text conversion, hook or monitor of a repository."""
    for name, value in (("diff.external", "touch"), ("core.fsmonitor", "touch")):
        git(repository, "config", name, f"{value} {tmp_path}/ran")
    git(repository, "config", "diff.x.textconv", f"touch {tmp_path}/ran;cat")
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "train.py").write_text("LR = 4\n")
    assert "+LR = 4" in state_of(repository)[1]
    assert not (tmp_path / "ran").exists()


def test_a_git_that_hangs_is_ended(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A git that hangs is ended with its children after a limit; earlier results are kept."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "git"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *" status "*) sleep 600;; esac\nexec {real.strip()} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(source_state, "GIT_SECONDS", 1.0)
    started = time.monotonic()
    found, diff = state_of(repository)
    assert (found.branch, diff) == ("main", None)
    assert "longer than 1 s" in (found.error or "")
    assert time.monotonic() - started < 300  # it did not wait for the end of the sleep


def test_packages_are_in_the_format_of_pip() -> None:
    """Packages are listed with versions in pip's format; packages of a folder are comments."""
    lines = requirements().splitlines()
    assert any(line.startswith("msgspec==") for line in lines)
    assert any(line.startswith("# halfstep==") for line in lines)
