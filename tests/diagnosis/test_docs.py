"""docs/reference/diagnosis.md has the sections that findings link to, and its code runs."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.diagnosis.registry import CAUSES, SHADOW_CAUSES

ALL = (*CAUSES, *SHADOW_CAUSES)
TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "diagnosis.md").read_text()
SECTIONS = {
    heading.lower().replace(" ", "-"): body
    for heading, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
}
PARTS = ("Symptom", "Evidence", "Cause", "Fix")


def test_every_cause_has_a_section() -> None:
    """Each cause has a section, whose anchor is its name with hyphens, in the table's order."""
    assert list(SECTIONS) == [cause.replace("_", "-") for cause in ALL]
    table = re.findall(r"^\| `(\w+)` \| \[([^\]]+)\]\(#([\w-]+)\) \|", TEXT, re.M)
    assert [cause for cause, _, _ in table] == list(ALL)
    for cause, heading, anchor in table:
        assert anchor == cause.replace("_", "-") == heading.lower().replace(" ", "-")


@pytest.mark.parametrize("anchor", SECTIONS)
def test_a_section_is_complete_and_its_code_runs(anchor: str) -> None:
    """A section has symptom, evidence, cause and fix, and the fix's assertions hold."""
    assert re.findall(r"^\*\*(\w+)\.\*\*", SECTIONS[anchor], re.M) == list(PARTS)
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS[anchor], re.S)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    names = {
        "torch": torch,
        "F": F,
        "device": "cpu",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=256.0),
        "inputs": torch.randn(8, 6),
        "targets": torch.randn(8, 1),
    }
    exec(code, names)
