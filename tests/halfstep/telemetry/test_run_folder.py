"""Names of runs that have no name of their own."""

import sys
from pathlib import Path

import pytest

import halfstep


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("nanoGPT/train.py", "nanoGPT-train"),
        ("my package/__main__.py", "my-package-__main__"),
        ("vision/resnet.py", "resnet"),
        ("-c", "run"),
        ("", "run"),
    ],
)
def test_a_run_is_named_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    """A run is named after its script, and also after its folder if that name is common."""
    monkeypatch.setattr(sys, "argv", [command])
    watch = halfstep.watch(folder=tmp_path, mode="offline", console=False, system=False)
    watch.finish()
    assert watch.folder is not None
    stem, day, _time = watch.folder.name.rsplit("-", 2)
    assert (stem, len(day)) == (name, 8)
