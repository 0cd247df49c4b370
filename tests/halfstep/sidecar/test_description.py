"""Git state, packages and code of a watched script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.sidecar.process import LOCK
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.run_folder import read_run
from tests import warm
from tests.site import until

pytestmark = pytest.mark.slow

SCRIPT = 'import halfstep\nhalfstep.watch(name="it", mode="offline"{})\n'


def run(folder: Path, options: str = "", **environment: str) -> dict[str, Any] | None:
    """Run a watched script in a folder; return the description of its attempt."""
    (folder / "train.py").write_text(SCRIPT.format(options))
    environment = {**os.environ, "HALFSTEP_GIT": "yes", **environment}
    script = warm.Popen([sys.executable, "train.py", "--lr", "1"], cwd=folder, env=environment)
    assert script.wait() == 0
    place = folder / "halfstep-runs" / "it"
    until(lambda: not FolderLock(place / LOCK).is_held())
    path = place / "description-1.json"
    return json.loads(path.read_text()) if path.exists() else None


def commit_all(folder: Path) -> str:
    """Make a folder a repository with one commit; return its hash."""
    for words in (["init", "-qb", "main"], ["commit", "--allow-empty", "-qm", "first"]):
        options = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *options, "-C", str(folder), *words], check=True)
    argv = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_patch_packages_and_command_are_recorded(tmp_path: Path) -> None:
    """Commit, patch, packages and command are recorded, also without output; the script is not."""
    commit = commit_all(tmp_path)
    found = run(tmp_path, MY_TOKEN="abcdefgh-secret", HALFSTEP_CONSOLE="no")
    assert found is not None
    assert (found["git"]["commit"], found["git"]["branch"]) == (commit, "main")
    assert "+++ b/train.py" in found["diff"]
    assert "msgspec==" in found["requirements"]
    assert (found["file"], found["source"]) == (None, None)
    attempt = read_run(tmp_path / "halfstep-runs" / "it").attempts[0]
    assert attempt.command[1:] == ["train.py", "--lr", "1"]


def test_the_code_is_saved_on_request(tmp_path: Path) -> None:
    """On request script and folder are saved as an artifact, with secrets in the text hidden."""
    (tmp_path / "model.py").write_text("x = 1\n")
    found = run(tmp_path, ', code=True)\nkey = dict(api_key="abcdefgh99"', HALFSTEP_CONSOLE="yes")
    assert found is not None
    assert found["git"] is None
    assert found["source"].startswith("import halfstep")
    assert "abcdefgh99" not in found["source"]
    assert len([*(tmp_path / "halfstep-runs" / "it" / "blobs").iterdir()]) == 2


def test_nothing_is_recorded_if_it_is_turned_off_or_fails(tmp_path: Path) -> None:
    """Nothing is recorded if this is disabled; without git the packages are still recorded."""
    commit_all(tmp_path)
    assert run(tmp_path, ", git=False") is None
    (tmp_path / "halfstep-runs").rename(tmp_path / "before")
    found = run(tmp_path, PATH=str(tmp_path / "none"))
    assert found is not None
    assert (found["git"], bool(found["requirements"])) == (None, True)
