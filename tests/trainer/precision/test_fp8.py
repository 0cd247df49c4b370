"""Linear layers in fp8 by torchao: its casts are real, its products on a CPU in fp32."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from halfstep.run_config import ConfigError, parse_config
from tests.trainer.conftest import CPU, Regression, assert_same_bits
from trainer import probe
from trainer.precision.fp8 import EMULATE, ranges, set_fp8


class Layers(Regression):
    """A recipe with two fp8 layers, one that does not fit, and a user's hook on the first."""

    calls = 0

    def __init__(self, config, device):
        super().__init__(config, device)
        self.inputs = torch.randn(64, 32)
        self.targets = self.inputs.sum(dim=1, keepdim=True)
        first = nn.Linear(32, 48)
        first.register_forward_hook(self.count)
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))
        self.modules = {"model": model}
        self.optimizers = {
            "it": torch.optim.AdamW(model.parameters(), lr=config.recipe.learning_rate, fused=True)
        }

    def count(self, *_called):
        self.calls += 1

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs).float(), targets), "it")


def values(steps=4, scales="tensorwise", **groups):
    training = {"steps": steps, "fp8": scales, "batch_size": 8}
    groups = {"diagnosis": {"headroom_every_steps": 2}} | groups
    return {"precision": "fp8", "training": training, **groups}


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv(EMULATE, "yes")


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_layers_train_in_fp8_and_report_rounding(run_loop, emulated, capsys, tmp_path, scales):
    """fp8 layers keep fp32 weights, names and hooks; layers that do not fit use bf16 and are named.

    A run resumes exactly; other scales, or bf16, give other weights.
    """
    whole = run_loop(Layers, values(6, scales), folder=tmp_path)
    model = whole.recipe.modules["model"]
    assert [type(model[at]).__name__ for at in (0, 2, 4)] == ["Float8Linear"] * 2 + ["Linear"]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert whole.recipe.calls == 6
    assert (
        "in bf16, because their sizes are not multiples of 16: model.4 (64 to 1)"
        in capsys.readouterr()[1]
    )
    assert [event["step"] for event in whole.of("fp8")] == [2, 4, 6]
    for event in whole.of("fp8"):
        assert [each["name"] for each in event["modules"]] == ["model.0", "model.2"]
        for each in event["modules"]:
            assert all(each[kind] > 0 for kind in ("activation", "weight", "gradient"))
            assert all(0 <= each[f"{kind}_underflow"] < 0.5 for kind in ("activation", "weight"))
    run_loop(Layers, values(3, scales), folder=tmp_path / "half")
    resumed = run_loop(Layers, values(6, scales), resume=tmp_path / "half" / "step-00000003.pt")
    assert_same_bits(resumed.weights(), whole.weights())
    assert resumed.of("resumed")[0]["notes"] == ["training.steps was 3, is 6"]
    for other in (values(6, scales) | {"precision": "bf16"}, values(6, "rowwise")):
        is_same = torch.equal(
            run_loop(Layers, other).weights()["model.0.weight"], whole.weights()["model.0.weight"]
        )
        assert is_same == (other["precision"] == "fp8" and scales == "rowwise")


def test_the_share_that_becomes_0_is_counted(emulated):
    """The underflow share is that of e4m3, 2^-9 to 448; row-wise scales preserve small rows."""
    small = torch.ones(2, 32)
    small[0, :8], small[1], small[1, :4] = 2.0**-20, 2.0**-20, 0.0
    found = {}
    for scales in ("tensorwise", "rowwise"):
        model = nn.Sequential(nn.Linear(32, 32))
        set_fp8({"model": model}, parse_config(Layers, values(scales=scales)), CPU)
        found[scales] = ranges(model[0], "activation", small).tolist()
        again = copy.deepcopy(model)
        assert again[0].weight is not model[0].weight
        torch.testing.assert_close(again(small), model(small))
    assert found == {"tensorwise": [1.0, 36.0, 60.0], "rowwise": [1.0, 8.0, 60.0]}


def test_modules_that_are_wanted_otherwise_are_left_out(run_loop, emulated):
    """Modules in modules.fp32 or modules.bf16, with their submodules, are not converted to fp8."""
    run = run_loop(Layers, values(2, modules={"bf16": ["model.0"]}))
    kinds = [type(run.recipe.modules["model"][at]).__name__ for at in (0, 2)]
    assert kinds == ["Linear", "Float8Linear"]
    everywhere = values(2, modules={"fp32": ["model.0"], "bf16": ["model.2"]})
    with pytest.raises(ConfigError, match=r"no linear layer supports it, because sizes .*model\.4"):
        run_loop(Layers, everywhere)


def test_fp8_is_rejected_where_unsupported(run_loop, monkeypatch):
    """fp8 is rejected on a CPU; without torchao the error says what to install."""
    assert not any(device.fp8 for device in probe.devices() if device.kind == "cpu")
    with pytest.raises(ConfigError, match="the device is a cpu; allowed: CUDA of compute cap"):
        run_loop(Layers, values())
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match="precision fp8 requires torchao, which is not installed"):
        run_loop(Layers, values())
