import pytest
import torch
from torch import nn

from halfstep.run_config import parse_config
from tests.marks import looped
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.diagnosis.shapes import misfits
from trainer.recipes.digits import Digits
from trainer.recipes.mlp import MLP


def layers_of(*layers, precision="fp16", batch_size=64):
    """Return a network's reported layers, and the batch size if reported."""
    values = {"precision": precision, "training": {"batch_size": batch_size}}
    event = misfits({"model": nn.Sequential(*layers)}, parse_config(Regression, values))
    return event and (event.layers, event.batch_size)


@looped(
    "layers, named",
    [
        (
            [nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 64)],
            ["model.0 (64 to 100)", "model.2 (100 to 64)"],
        ),
        (
            [nn.Conv2d(3, 60, 3), nn.Conv2d(60, 64, 3), nn.Conv2d(64, 64, 3)],
            ["model.1 (60 to 64)", "model.0 (3 to 60)"],
        ),
        ([nn.Embedding(50257, 8), nn.Linear(8, 50257)], ["model.1 (8 to 50257)"]),
        ([nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 19, 2)], None),  # colours and classes
        ([nn.Linear(64, 64), nn.Linear(64, 10)], None),
        (
            [nn.Conv2d(8, 9, 1), nn.Conv2d(9, 9, 3, groups=9), nn.Conv2d(9, 8, 1)],
            ["model.0 (8 to 9)", "model.2 (9 to 8)"],
        ),
        ([nn.Linear(8, 4), nn.Linear(4, 512), nn.Linear(512, 512)], None),  # 1 % of the weights
    ],
)
def test_layers_that_miss_tensor_cores_are_named(layers, named):
    """Layers within a network and a vocabulary that miss tensor cores are named, but no small
    layers and no sizes of the data.

    Catches a warning at every classifier of ten classes, and at depthwise convolutions.
    """
    assert layers_of(*layers) == (named and (named, None))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_only_half_precision_is_concerned(precision):
    """In fp32 no layer sizes are reported."""
    found = layers_of(nn.Linear(64, 100), nn.Linear(100, 64), precision=precision)
    assert (found is None) == (precision == "fp32")


def test_the_batch_size_counts_where_a_row_is_an_example():
    """The batch size is reported for linear layers only; sequences and images multiply rows."""
    assert layers_of(nn.Linear(8, 8), batch_size=50) == (["model.0 (8 to 8)"], 50)
    assert layers_of(nn.Embedding(8, 8), nn.Linear(8, 8), batch_size=50) is None
    assert layers_of(nn.Conv2d(8, 8, 3), nn.Linear(8, 8), batch_size=50) is None


def test_at_most_a_few_layers_are_listed(run_loop):
    """The largest layers that miss tensor cores are listed once at the start, with their number."""
    wide = {"width": 36, "layers": 9, "batches": 1}
    run = run_loop(MLP, {"recipe": wide, "training": {"steps": 2, "batch_size": 8}})
    [event] = run.of("shapes")
    assert (event["step"], event["count"], event["share"]) == (0, 9, 1.0)
    assert event["layers"] == [f"model.{index} (36 to 36)" for index in (0, 2, 4, 6)]
    assert not run_loop(Digits, {"training": {"steps": 1}}).of("shapes")


def test_looking_at_sizes_reads_no_weight(run_loop, tmp_path):
    """Reading sizes reads no weight, since spectral_norm iterates at each reading."""

    class Normed(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            spectral_norm = torch.nn.utils.parametrizations.spectral_norm
            self.modules["model"][0] = spectral_norm(self.modules["model"][0])
            parameters = self.modules["model"].parameters()
            self.optimizers = {"sgd": torch.optim.SGD(parameters, lr=0.01, fused=True)}

    values = {
        "precision": "fp16",
        "training": {"steps": 6},
        "checkpoints": {"every_steps": 3},
    }
    whole = run_loop(Normed, values, tmp_path / "a")
    resumed = run_loop(Normed, values, tmp_path / "b", resume=tmp_path / "a/step-00000003.pt")
    assert_same_bits(resumed.weights(), whole.weights())
