"""docs/tutorial: code that newcomers copy."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.halfstep.watching.watch_made import Written

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "watch-a-script.md"
CHECKED = ROOT / "docs" / "tutorial" / "check-a-script.md"


def test_the_loop_of_the_tutorial_is_watched(tmp_path: Path) -> None:
    """The tutorial's loop is watched unchanged, with each step's loss and scale."""
    [code] = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(code)
    environment = {**os.environ, "HALFSTEP_MODE": "offline"}
    ended = warm.run([sys.executable, str(script)], cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    [folder] = (tmp_path / "halfstep-runs").iterdir()
    steps = Written(folder).steps
    assert len(steps) == 50
    assert (steps["scale"] >= 1).all()


def test_the_mistake_of_the_tutorial_is_found_and_repaired(tmp_path: Path) -> None:
    """The check prints what the tutorial shows, and finds no mistake in the repaired function."""
    code, repaired = re.findall(r"```python\n(.*?)```", CHECKED.read_text(), re.S)
    shown = re.findall(r"```\n(train\.py: .*?)```", CHECKED.read_text(), re.S)
    mended = re.sub(r"def normalized.*?\n\n", f"{repaired}\n", code, flags=re.S)
    for script, text, exit_code in ((code, shown[0], 1), (mended, shown[1], 0)):
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, "-m", "halfstep.cli.main", "check", "train.py"]
        ended = warm.run(command, cwd=tmp_path)
        assert ended.returncode == exit_code
        assert ended.stdout.split() == text.split()
