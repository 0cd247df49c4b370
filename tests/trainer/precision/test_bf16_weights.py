"""Weights in bf16 without masters: casts of weights, and updates that round away."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss, RecipeError
from tests.marks import extended
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.recipes.digits import Digits

BF16 = {"precision": "bf16", "training": {"steps": 4, "weights": "bf16"}}


class Large(Regression):
    """A recipe with weights of 1, gradients of 1 and 0, and a rate that decides which updates
    round away.
    """

    def __init__(self, config, device):
        self.device, self.train_size = device, 64
        self.inputs, self.targets = torch.ones(64, 1), torch.zeros(64, 1)
        model = nn.Linear(1, 768, bias=False)
        nn.init.ones_(model.weight)
        self.modules = {"model": model}
        self.optimizers = {
            "sgd": torch.optim.SGD(model.parameters(), lr=config.recipe.learning_rate)
        }

    def training_step(self, batch):
        inputs, _targets = batch
        output = self.modules["model"](inputs)
        yield Loss(output.float()[:, :384].sum() / len(inputs), "sgd")


@pytest.mark.parametrize(
    ("weights", "rate", "lost"),
    [("bf16", 2.0**-10, 384), ("bf16", 2.0**-6, 0), ("fp32", 2.0**-10, None)],
)
def test_updates_that_round_away_are_counted(run_loop, weights, rate, lost):
    """384 of 768 weights have a gradient, and the number below 1 in bf16 is 2^-8 away. In fp32
    all weights move, and nothing is counted.
    """
    values = {"precision": "bf16", "training": {"weights": weights, "max_grad_norm": None}}
    values |= {"recipe": {"learning_rate": rate}, "diagnosis": {"updates_every_steps": 2}}
    run = run_loop(Large, values)
    weight = run.recipe.modules["model"].weight
    assert weight.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[weights]
    assert int((weight != 1).sum()) == (0 if lost else 384)
    modules = [{"name": "model", "wanted": 384, "lost": lost}]
    result = [(event["step"], event["modules"]) for event in run.of("updates")]
    assert result == ([] if lost is None else [(2, modules), (4, modules)])


def test_a_second_loss_does_not_change_the_count(run_loop):
    """Lost updates are counted by the first loss, although a second one has gradients too."""

    class Twice(Large):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["other"] = other = nn.Linear(1, 1)
            self.optimizers["other"] = torch.optim.SGD(other.parameters(), lr=0.1)

        def training_step(self, batch):
            yield from super().training_step(batch)
            inputs, targets = batch
            output = self.modules["model"](inputs).float()
            mean = self.modules["other"](output.mean(dim=1, keepdim=True))
            yield Loss(F.mse_loss(mean.float(), targets), "other")

    values = BF16 | {"recipe": {"learning_rate": 2.0**-10}, "diagnosis": {"updates_every_steps": 4}}
    [event] = run_loop(Twice, values).of("updates")
    assert event["modules"][0] == {"name": "model", "wanted": 384, "lost": 384}


class Mixed(Regression):
    """A recipe with BatchNorm, LayerNorm, and an optimizer that creates its moments at once."""

    def __init__(self, config, device):
        super().__init__(config, device)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 1)
        )  # fmt: skip
        self.modules = {"model": model}
        self.optimizers = {"it": torch.optim.Adagrad(model.parameters(), fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs).float(), targets), "it")


def test_all_but_running_statistics_and_their_norm_is_bf16(run_loop, tmp_path):
    """With bf16 weights running statistics and their norm stay fp32; the run resumes exactly."""
    run = run_loop(Mixed, BF16, folder=tmp_path)
    weights = run.weights()
    fp32 = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert fp32 == {f"model.1.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    for weight, state in run.recipe.optimizers["it"].state.items():
        assert state["sum"].dtype == weight.dtype
    longer = {"precision": "bf16", "training": {"steps": 7, "weights": "bf16"}}
    whole = run_loop(Mixed, longer)
    resumed = run_loop(Mixed, longer, resume=tmp_path / "step-00000004.pt")
    assert_same_bits(resumed.weights(), whole.weights())


def test_a_fork_may_change_the_weights_type(run_loop, tmp_path):
    """A fork may change the weights' type, by rounding to bf16 or exactly to fp32."""
    run_loop(Mixed, BF16, folder=tmp_path)
    path = tmp_path / "step-00000004.pt"
    fork = run_loop(Mixed, {"precision": "bf16", "training": {"steps": 6}}, resume=path)
    assert {w.dtype for w in fork.recipe.modules["model"].parameters()} == {torch.float32}
    assert {s["sum"].dtype for s in fork.recipe.optimizers["it"].state.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_in_other_precisions_the_setting_says_nothing(run_loop, precision):
    """The setting for bf16 weights has no effect in other precisions, so that runs are
    comparable.
    """
    values = {"precision": precision}
    run = run_loop(Digits, values | {"training": {"steps": 3, "weights": "bf16"}})
    assert_same_bits(run.weights(), run_loop(Digits, values | {"training": {"steps": 3}}).weights())


@pytest.mark.parametrize(
    ("dtype", "precision", "is_refused"),
    [
        (torch.float16, "bf16", True),
        (torch.float16, "fp32", True),
        (torch.bfloat16, "fp16", True),
        (torch.bfloat16, "bf16", False),
    ],
)
def test_a_recipes_own_half_weights(run_loop, dtype, precision, is_refused):
    """A recipe's own bf16 weights are allowed without loss scaling, and fp16 weights never."""

    class Halved(Mixed):
        def __init__(self, config, device):
            super().__init__(config, device)
            model = nn.Sequential(nn.Linear(6, 1).to(dtype))
            self.modules = {"model": model}
            self.optimizers = {"it": torch.optim.AdamW(model.parameters(), fused=True)}

    if is_refused:
        with pytest.raises(RecipeError, match=r"parameter model.0.weight is .*bf16 is allowed"):
            run_loop(Halved, {"precision": precision})
    else:
        assert run_loop(Halved, {"precision": precision}).outcome.step == 5


@pytest.mark.slow
def test_a_fused_sgd_that_would_not_train_is_rejected(run_loop):
    """A fused SGD with bf16 weights is rejected on a CPU, whose kernel leaves them unchanged."""
    values = {"precision": "bf16", "training": {"weights": "bf16"}}
    with pytest.raises(RecipeError, match='"sgd" is a fused SGD of weights in bf16'):
        run_loop(Regression, values)
    unfused = {"precision": "bf16", "training": {"weights": "bf16", "fused": False}}
    assert run_loop(Unfused, unfused).outcome.step == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, *extended([0.9])])
def test_a_rejected_fused_sgd_is_explained(dtype, momentum):
    """A fused SGD with bf16 weights is rejected: on a CPU it updates only the last n mod 16 of n
    weights; see docs/explanation/amp.md.
    """
    for count in (1, 15, 16, 17, 1000, 40_003):
        weights = torch.nn.Parameter(torch.ones(count, dtype=dtype))
        sgd = torch.optim.SGD([weights], lr=0.125, momentum=momentum, fused=True)
        weights.grad = torch.ones_like(weights)
        sgd.step()
        expected = [1.0] * (count - count % 16) + [0.875] * (count % 16)
        assert weights.tolist() == expected


class Unfused(Regression):
    """A recipe that computes its loss in fp32."""

    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs).float(), targets), "sgd")
