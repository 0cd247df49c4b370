import numpy as np
import pytest
import torch

from halfstep.config_groups import Diagnosis
from halfstep.recording.layers import Layers
from tests.trainer.conftest import Pair, assert_same_bits
from trainer.layers import MOST_SAMPLES, layer_interval


def test_layer_norms_are_those_of_the_gradients_before_the_clip(run_loop):
    """At every interval each layer's norms are recorded, before the clip and in forward order."""
    values = {"diagnosis": {"layer_norms_every_steps": 4}, "training": {"max_grad_norm": 1e-3}}
    run = run_loop(Pair, values)
    result = run.of("layer_norms")
    assert [event["step"] for event in result] == list(range(4, 41, 4))
    assert result[0]["layers"] == ["model.0", "model.2", "second"]
    for event in result:
        total = run.records["grad_norm"][event["step"] - 1]
        joint = np.sqrt(np.square(event["norms"]).sum())
        assert np.isfinite(total) == np.isfinite(joint)
        assert joint == pytest.approx(total, rel=1e-5) or not np.isfinite(total)


def test_layer_norms_change_no_bit(run_loop):
    """Weights are equal with and without layer norms."""
    without = run_loop(Pair, {"diagnosis": {"layer_norms_every_steps": 0}})
    assert not without.of("layer_norms")
    with_them = run_loop(Pair, {"diagnosis": {"layer_norms_every_steps": 1}})
    assert_same_bits(with_them.weights(), without.weights())


def test_parameters_of_a_layer_are_joined():
    """Weight and bias of a layer have one joint norm; inf and NaN are preserved."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    layers = Layers(f"net.{name}" for name, _ in network.named_parameters())
    assert layers.names == ["net.0", "net.1"]
    assert layers.norms([3.0**2, 4.0**2, 7.0**2]) == [5, 7]
    assert layers.norms(np.square([0.0, 6.0, 2.0])) == [6, 2]
    norms = layers.norms([np.inf, 4.0**2, np.nan])
    assert norms[0] == np.inf
    assert np.isnan(norms[1])


@pytest.mark.parametrize(
    ("steps", "wanted", "interval"), [(100, 50, 50), (10**7, 50, 10**7 // MOST_SAMPLES), (9, 0, 0)]
)
def test_a_long_run_sends_no_more_than_a_screen_shows(steps, wanted, interval):
    """The interval of layer norms grows with a run's length, and 0 means never."""
    assert layer_interval(steps, Diagnosis(layer_norms_every_steps=wanted)) == interval
