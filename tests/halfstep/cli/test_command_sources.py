"""Digests of a command's code, as the client submits and the worker compares them."""

from pathlib import Path

import pytest

from halfstep.cli import command_sources
from halfstep.cli.command_sources import list_changed, sources_of


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with code, and with many files that are not code."""
    for name in ("train.py", "lib/model.py", "conf/base.yaml", "data.csv", ".git/hook.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("env/pyvenv.cfg", "env/site.py", "__pycache__/x.py", "wandb/run.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_script_and_code_of_the_folder_are_noted(project: Path) -> None:
    """The script comes first, then the folder's code without data, environments and hidden
    files.
    """
    found = sources_of(["python", "lib/model.py", "--lr", "{lr}"], str(project))
    assert list(found) == ["lib/model.py", "train.py", "conf/base.yaml"]
    assert next(iter(sources_of(["python", "-m", "lib.model"], str(project)))) == "lib/model.py"
    assert list(sources_of(["python", str(project / "train.py")], "")) == [f"{project}/train.py"]
    assert sources_of(["python", "train.py"], "") == {}
    assert sources_of(["python", "train.py"], str(project / "nowhere")) == {}


def test_changed_and_deleted_files_are_named(project: Path) -> None:
    """Changed and deleted files are named; new files are ignored."""
    found = sources_of(["python", "train.py"], str(project))
    assert list_changed(found, project) == []
    (project / "train.py").write_text("edited")
    (project / "lib" / "model.py").unlink()
    (project / "new.py").touch()
    assert list_changed(found, project) == ["train.py", "lib/model.py"]


def test_a_large_folder_is_noted_in_part(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large folder the script is recorded, then the files nearest to the folder."""
    monkeypatch.setattr(command_sources, "MOST_FILES", 2)
    assert list(sources_of(["sh", "lib/model.py"], str(project))) == ["lib/model.py", "train.py"]
