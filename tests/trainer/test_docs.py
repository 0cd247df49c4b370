import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SNIPPETS = re.findall(
    r"## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", Path("docs/amp.md").read_text(), re.S
)


@pytest.mark.parametrize(
    "snippet", [code for _, code in SNIPPETS], ids=[name for name, _ in SNIPPETS]
)
def test_a_snippet_of_the_guide_runs(snippet):
    """Each does what its paragraph says: it runs on the CPU, and its assertions hold."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    names = {
        "torch": torch,
        "F": F,
        "device": "cpu",
        "model": model,
        "second": torch.nn.Linear(6, 1),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=256.0),
        "inputs": torch.randn(8, 6),
        "targets": torch.randn(8, 1),
    }
    exec(snippet, names)


def test_the_guide_has_a_snippet_for_each_pattern_with_code():
    """No snippet is missed: as many are run as the guide has."""
    assert len(SNIPPETS) == Path("docs/amp.md").read_text().count("```python") >= 12
