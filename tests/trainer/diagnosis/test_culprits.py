import numpy as np
import pytest
import torch

from tests.trainer.conftest import Pair
from trainer import optimizers
from trainer.optimizers import watch_optimizers
from trainer.recipes.digits import Digits


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", [Digits, Pair])
def test_culprits_and_their_counts_are_the_truth(run_loop, monkeypatch, recipe, fused):
    """Each skip has the parameters with inf or NaN in forward order, with their counts.
    Counting after the clip, which makes every gradient NaN if one is, would be detected.
    """
    truth = []
    original = optimizers.WatchedOptimizer.count_nonfinite

    def observe(self, *args):
        counts = [
            {"name": name, "inf": int(np.isinf(g).sum()), "nan": int(np.isnan(g).sum())}
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if not np.isfinite(g := parameter.grad.numpy()).all()
        ]
        if counts:
            truth.append(counts)
        return original(self, *args)

    monkeypatch.setattr(optimizers.WatchedOptimizer, "count_nonfinite", observe)
    values = {
        "training": {"steps": 60, "fused": fused, "max_grad_norm": 0.1},
        "scaler": {"init_scale": 2.0**22, "growth_interval": 5},
    }
    run = run_loop(recipe, values)
    result = [event["culprits"] for event in run.of("scaler", kind="skip")]
    assert result == truth
    assert any(culprit["inf"] > 0 for culprits in result for culprit in culprits)
    assert any(len(culprits) < len(result[0]) for culprits in result)


def test_counts_are_of_elements():
    """Each inf and each NaN is counted once for its parameter; finite parameters are left out."""
    network = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(network.parameters())
    sgd = watch_optimizers({"model": network}, {"sgd": optimizer})["sgd"]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert sgd.count_nonfinite(sgd.gradient_norms()) == {}
    first, _, third, last = [parameter.grad for parameter in network.parameters()]
    first[0, 0] = first[2, 4] = torch.nan
    third[0, 1] = -torch.inf
    last[1] = torch.inf
    last[0] = torch.nan
    counts = sgd.count_nonfinite(sgd.gradient_norms())
    assert counts == {0: (0, 2), 2: (1, 0), 3: (1, 1)}


@pytest.mark.parametrize("recipe", [Digits, Pair])
def test_without_counts_the_norms_name_the_same_culprits(run_loop, monkeypatch, recipe):
    """On a GPU, without counts that would synchronize, the norms name the same parameters."""
    values = {"training": {"steps": 60}, "scaler": {"init_scale": 2.0**22, "growth_interval": 5}}
    counted = run_loop(recipe, values).of("scaler", kind="skip")
    monkeypatch.setattr("trainer.step.value_on_host", lambda _: None)
    named = run_loop(recipe, values).of("scaler", kind="skip")
    assert [skip["culprits"] for skip in named] == [
        [{"name": culprit["name"]} for culprit in skip["culprits"]] for skip in counted
    ]


def test_a_norm_that_overflows_has_no_culprits(run_loop):
    """An overflowed norm of finite gradients names no parameters."""
    run = run_loop(Digits, {"training": {"steps": 2}, "scaler": {"init_scale": 1.0}})
    assert not run.of("scaler")
