"""docs/tutorial: the code that newcomers copy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.halfstep.watching.watch_made import Written

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "watch-a-script.md"


def test_the_loop_of_the_tutorial_is_watched(tmp_path: Path) -> None:
    """It runs unchanged, and each step is recorded with its loss and scale."""
    [code] = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(code)
    environment = {**os.environ, "HALFSTEP_MODE": "offline", "PYTHONPATH": str(TUTORIAL.parents[2])}
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path, env=environment)
    [folder] = (tmp_path / "halfstep-runs").iterdir()
    steps = Written(folder).steps
    assert len(steps) == 50
    assert (steps["scale"] >= 1).all()
