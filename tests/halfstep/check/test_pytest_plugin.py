"""The fixture `halfstep_check`, in a run of pytest of its own."""

import os
import sys
from pathlib import Path

from tests import warm

TESTS = """
import torch
from torch import nn

def train(factor):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = net(torch.ones(2, 4))
        (hidden.float().square() / factor).mean().backward()
        optimizer.step()

def test_sound(halfstep_check):
    with halfstep_check() as check:
        train(1.0)
    assert check.steps == 5

def test_undefined(halfstep_check):
    with halfstep_check(steps=3):
        train(0.0)

def test_allowed(halfstep_check):
    with halfstep_check(allow=("undefined", "carried")):
        train(0.0)

def test_without_a_step(halfstep_check):
    with halfstep_check():
        pass
"""


def test_a_test_fails_with_the_report(tmp_path: Path) -> None:
    """In pytest a correct loop passes, and a mistake or a loop without a step fails."""
    (tmp_path / "test_training.py").write_text(TESTS)
    plugin = ["-p", "halfstep.check.pytest_plugin", "-p", "no:cacheprovider"]
    start = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-q", *plugin, "test_training.py"]
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = warm.run(command, cwd=tmp_path, env=own, timeout=120)
    assert "test_training.py::test_undefined" in ended.stdout
    assert "test_training.py:13  Undefined in every precision" in ended.stdout
    assert "halfstep_check: no optimizer stepped" in ended.stdout
    assert "2 failed, 2 passed" in ended.stdout, ended.stdout
