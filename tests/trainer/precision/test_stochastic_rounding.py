"""Weights in bf16 with stochastic rounding, by torchao."""

import sys

import pytest
import torch
from torch import nn

from halfstep.recipe import Loss
from halfstep.run_config import ConfigError, parse_config
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.precision.stochastic_rounding import StochasticAdamW

RATE = 2.0**-11  # an eighth of the way to bf16's next number below 1


class Small(Regression):
    """A recipe with weights of 1, and AdamW updates below half the distance to the next number."""

    optimizer = torch.optim.AdamW

    def __init__(self, config, device):
        super().__init__(config, device)
        self.inputs = torch.ones(64, 1)
        model = nn.Linear(1, 4096, bias=False)
        nn.init.ones_(model.weight)
        self.modules = {"model": model}
        self.optimizers = {
            "it": self.optimizer(model.parameters(), lr=config.recipe.learning_rate, **self.options)
        }

    @property
    def options(self):
        return {"weight_decay": 0.0, "fused": True}

    def training_step(self, batch):
        inputs, _targets = batch
        yield Loss(self.modules["model"](inputs).float().mean(), "it")


def values(steps, rounding="stochastic", **training):
    training = {"steps": steps, "weights": "bf16", "rounding": rounding, **training}
    recipe = {"learning_rate": RATE}
    return {"precision": "bf16", "training": training, "recipe": recipe} | {
        "diagnosis": {"updates_every_steps": 4}
    }


def test_small_updates_add_up_and_the_saved_ones_are_counted(run_loop):
    """Updates that rounding to nearest loses add up by stochastic rounding, and are counted."""
    nearest = run_loop(Small, values(8, "nearest")).recipe.modules["model"].weight
    assert bool((nearest == 1).all())
    run = run_loop(Small, values(8))
    weight = run.recipe.modules["model"].weight
    assert weight.dtype == torch.bfloat16
    assert weight.float().mean().item() == pytest.approx(1 - 8 * RATE, abs=RATE / 4)
    for event in run.of("updates"):
        [counted] = event["modules"]
        assert counted["wanted"] == 4096 == counted["lost"] + counted["saved"]
        assert counted["saved"] == pytest.approx(4096 / 8, rel=0.2)
    assert [event["step"] for event in run.of("updates")] == [4, 8]


def test_a_count_that_fails_ends_no_run(run_loop, monkeypatch):
    """A failing count of updates is reported once, and leaves the weights unaffected."""

    def nearest(_self, _weight):
        raise MemoryError("no room for a copy")

    whole = run_loop(Small, values(8))
    monkeypatch.setattr(StochasticAdamW, "nearest", nearest)
    run = run_loop(Small, values(8))
    [event] = run.of("failed_diagnosis")
    assert (event["step"], "no room for a copy" in event["error"]) == (4, True)
    assert run.of("updates") == []
    assert_same_bits(run.weights(), whole.weights())


@pytest.mark.slow
def test_a_run_resumes_exactly_and_forks_may_round_otherwise(run_loop, tmp_path):
    """Stochastic rounding depends on seed and earlier updates only; a resume is exact."""
    whole = run_loop(Small, values(9))
    run_loop(Small, values(4), folder=tmp_path)
    path = tmp_path / "step-00000004.pt"
    resumed = run_loop(Small, values(9), resume=path)
    assert_same_bits(resumed.weights(), whole.weights())
    [result] = resumed.of("resumed")
    assert result["notes"] == ["training.steps was 4, is 9"]
    fork = run_loop(Small, values(6, "nearest"), resume=path, folder=tmp_path / "fork")
    assert type(fork.recipe.optimizers["it"]) is torch.optim.AdamW
    back = run_loop(Small, values(8), resume=tmp_path / "fork" / "step-00000006.pt")
    [state] = back.recipe.optimizers["it"].state.values()
    assert state["step"] == 8
    other = run_loop(Small, values(9, seed=1))
    assert not torch.equal(other.weights()["model.weight"], whole.weights()["model.weight"])


def test_ranks_round_alike():
    """Ranks with different random states round alike, since their weights must stay equal."""
    weights = []
    for seed in (1, 2):
        weight = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        plain = torch.optim.AdamW([weight], lr=RATE)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        StochasticAdamW(plain, seed=7, is_compiled=False).step()
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(weight.detach())
    assert torch.equal(*weights)
    assert 0 < int((weights[0] != 1).sum()) < 512


class Decayed(Small):
    optimizer = torch.optim.Adam
    options = {"weight_decay": 0.1, "fused": True}  # noqa: RUF012


class Unknown(Small):
    optimizer = torch.optim.SGD
    options = {"fused": False}  # noqa: RUF012


class Scheduled(Small):
    def __init__(self, config, device):
        super().__init__(config, device)
        torch.optim.lr_scheduler.ConstantLR(self.optimizers["it"])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Unknown, '"it" is SGD, which torchao does not provide; allowed: AdamW, or Adam without'),
        (Decayed, '"it" is Adam, which torchao does not provide'),
        (Scheduled, '"it" has its own learning-rate scheduler'),
    ],
)
def test_unsupported_optimizers_are_rejected(run_loop, recipe, message):
    """The error for an unsupported optimizer has its name and the allowed ones."""
    with pytest.raises(ConfigError, match=message):
        run_loop(recipe, values(2, schedule="recipe"))


def test_without_torchao_or_bf16_weights_it_is_rejected(run_loop, monkeypatch):
    """Without torchao, or with fp32 weights, stochastic rounding is rejected with the reason."""
    with pytest.raises(
        ConfigError, match="rounding is stochastic, but weights is fp32; set weights"
    ):
        parse_config(Small, {"training": {"rounding": "stochastic"}})
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"pip install 'halfstep-service\[torchao\]'"):
        run_loop(Small, values(2))
