"""Git checkouts of commands."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.worker.commands.checkout_made import commit_files, git
from worker.commands.checkout import CannotCheckOut, check_out


def check_out_commit(repository: Path, commit: str, folder: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)}
    return check_out(f"file://{repository}", commit, folder, environment, lambda: None)


@pytest.mark.slow
def test_submodules_are_at_the_commits_that_the_repository_names(tmp_path: Path) -> None:
    """Nested submodules with relative addresses are checked out, also by a second attempt."""
    commit_files(tmp_path / "inner", text="inner")
    commit_files(tmp_path / "lib", text="as it was")
    git(tmp_path / "lib", "submodule", "--quiet", "add", f"file://{tmp_path}/inner")
    commit_files(tmp_path / "lib")
    commit_files(tmp_path / "it", text="it")
    git(tmp_path / "it", "submodule", "--quiet", "add", f"file://{tmp_path}/lib", "lib")
    commit = commit_files(tmp_path / "it")
    commit_files(tmp_path / "lib", text="as it is now")
    folder = tmp_path / "work"
    for _attempt in range(2):
        assert check_out_commit(tmp_path / "it", commit[:7], folder) == commit
        assert (folder / "lib" / "text").read_text() == "as it was"
        assert (folder / "lib" / "inner" / "text").read_text() == "inner"
    assert git(folder / "lib", "status", "--porcelain") == ""


@pytest.mark.parametrize(
    "url", ["ssh://git@host/it", "git://host/it", "ext::touch it", "http://h/"]
)
def test_a_submodule_comes_by_no_other_way(tmp_path: Path, url: str) -> None:
    """A submodule may use only its repository's protocols; an incomplete checkout is removed."""
    commit_files(tmp_path / "lib", text="lib")
    commit_files(tmp_path / "it", text="it")
    git(tmp_path / "it", "submodule", "--quiet", "add", f"file://{tmp_path}/lib", "lib")
    modules = tmp_path / "it" / ".gitmodules"
    modules.write_text(modules.read_text().replace(f"file://{tmp_path}/lib", url))
    commit = commit_files(tmp_path / "it")
    with pytest.raises(CannotCheckOut, match=r"transport .* not allowed"):
        check_out_commit(tmp_path / "it", commit, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_second_attempt_runs_nothing_that_the_first_has_named(tmp_path: Path) -> None:
    """A second attempt runs neither hooks nor configuration that the first script wrote."""
    commit = commit_files(tmp_path / "it", text="it")
    folder, touched = tmp_path / "work", tmp_path / "touched"
    check_out_commit(tmp_path / "it", commit, folder)
    program = tmp_path / "evil.sh"
    program.write_text(f"#!/bin/sh\ntouch {touched}\n")
    program.chmod(0o755)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    hooks = ("core.fsmonitor", "core.sshCommand", "diff.external", "alias.rev-parse")
    for name in (*hooks, "filter.evil.clean", "filter.evil.process", "diff.evil.textconv"):
        git(folder, "config", name, f"!{program}" if name.startswith("alias") else str(program))
    (folder / "text").write_text("changed")
    assert check_out_commit(tmp_path / "it", commit, folder) == commit
    assert not touched.exists()


def test_a_patch_is_applied_within_the_folder(tmp_path: Path) -> None:
    """A patch that leads out of the folder, or does not apply, is refused without a trace."""
    commit = commit_files(tmp_path / "it", text="one\n")
    (tmp_path / "it" / "text").write_text("two\r\n")
    (tmp_path / "it" / "new").write_text("new\n" * 50_000)
    git(tmp_path / "it", "add", "--intent-to-add", "new")
    diff = ["git", "-C", str(tmp_path / "it"), "diff"]
    patch = subprocess.run(diff, capture_output=True, check=True).stdout.decode()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    url, folder = f"file://{tmp_path}/it", tmp_path / "work"
    check_out(url, commit, folder, environment, lambda: None, patch=patch)
    assert (folder / "text").read_bytes() == b"two\r\n"
    assert (folder / "new").stat().st_size == 200_000
    outside = patch.replace("a/text", "a/../text").replace("b/text", "b/../text")
    for wrong in (outside, "not a patch\n"):
        with pytest.raises(CannotCheckOut, match="apply"):
            check_out(url, commit, tmp_path / "other", environment, lambda: None, patch=wrong)
    assert not (tmp_path / "other").exists()
