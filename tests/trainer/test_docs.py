import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from tests.marks import extended
from tests.trainer.conftest import Pair, Regression, assert_same_bits
from tests.trainer.docs_made import LINES

SNIPPETS = re.findall(
    r"## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```",
    Path("docs/explanation/amp.md").read_text(),
    re.S,
)


@pytest.mark.parametrize(
    "snippet", [code for _, code in SNIPPETS], ids=[name for name, _ in SNIPPETS]
)
def test_a_snippet_of_the_guide_runs(snippet):
    """Each snippet of the guide runs on the CPU, and its assertions hold."""
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
    """All snippets of the guide are run."""
    assert len(SNIPPETS) == Path("docs/explanation/amp.md").read_text().count("```python") >= 12


class Adversaries(Pair):
    """Two networks that are called as in the guide."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules = dict(zip(("generator", "critic"), self.modules.values(), strict=True))

    def training_step(self, batch):
        inputs, targets = batch
        output = self.modules["generator"](inputs)
        yield Loss(F.mse_loss(output, targets), "sgd")
        yield Loss(F.mse_loss(self.modules["critic"](output.detach()), targets), "adam")


class Tied(Regression):
    """A recipe whose first and last layer share a weight."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"] = model = nn.Sequential(
            nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 1)
        ).to(device)
        model[2].weight = model[0].weight
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=0.1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "recipe", "names"),
    [
        ("One module", Regression, {"model": "model"}),
        ("Tied weights", Tied, {"tied": "model"}),
        *extended(
            [
                ("Several modules", Adversaries, {"generator": "generator", "critic": "critic"}),
                ("The moving average", Regression, {"model": "model"}),
                ("The whole state", Regression, {"model": "model"}),
            ]
        ),
    ],
)
def test_saved_weights_load_as_documented(run_loop, tmp_path, monkeypatch, begins, recipe, names):
    """Each documented line loads trained weights into new modules."""
    decay = 0.5 if begins == "The moving average" else None
    values = {"training": {"steps": 400, "ema_decay": decay}, "evaluation": {"every_steps": None}}
    run = run_loop(recipe, values, folder=tmp_path)
    drawn = recipe(run.recipe.config, torch.device("cpu"))
    modules = {name: drawn.modules[own] for name, own in names.items()}
    [code] = [code for paragraph, code in LINES if paragraph.startswith(begins)]
    monkeypatch.chdir(tmp_path)
    exec(code, {"torch": torch, "safetensors": safetensors, **modules})
    state = torch.load("step-00000400.pt", weights_only=True)
    trained = state["parts"]["ema"]["weights"] if decay else state["modules"]
    for name, own in names.items():
        assert_same_bits(dict(modules[name].state_dict()), dict(trained[own]))


def test_every_way_of_loading_is_tried():
    """All documented ways to load weights are tested; that of a Hugging Face model is in
    tests/frameworks/test_finetune.py.
    """
    assert len(LINES) == 6
    assert LINES[-1][0].startswith("A Hugging Face model")
