import numpy as np
import torch

from halfstep.config_groups import Diagnosis
from halfstep.watching.exponents import BIAS, BINS, describe
from tests.marks import looped
from tests.trainer.conftest import CPU, Regression
from trainer.diagnosis.histogram import Histogram
from trainer.optimizers import StepResult, watch_optimizers
from trainer.recipes.digits import Digits


def histogram_of(gradient, scale=1.0):
    """Return the histogram event of a layer with this weight gradient."""
    layer = torch.nn.Linear(gradient.shape[1], gradient.shape[0], bias=False)
    layer.weight.grad = gradient
    optimizers = watch_optimizers({"model": layer}, {"sgd": torch.optim.SGD(layer.parameters())})
    events = []
    settings = Diagnosis(histogram_every_steps=1)
    histogram = Histogram(optimizers, settings, CPU, events.append)
    histogram.before_step(1)
    histogram.before_clip(optimizers["sgd"], optimizers["sgd"].one)
    zero = torch.zeros(())
    histogram.after_step(StepResult(zero, torch.tensor(scale), {}, set()))
    histogram.drain()
    return events[0]


def test_counts_are_those_of_numpys_exponents():
    """Every gradient is counted once by its exponent, and zeros, subnormals, inf and NaN apart."""
    gradient = torch.randn(40, 50) * torch.exp2(torch.randint(-40, 20, (40, 50)).float())
    gradient[0, :5] = torch.tensor([0.0, 1e-40, torch.inf, -torch.inf, torch.nan])
    [module] = histogram_of(gradient).modules
    values = gradient.flatten().numpy()
    normal = values[np.isfinite(values) & (np.abs(values) > 1e-38)]
    exponents = np.floor(np.log2(np.abs(normal.astype(np.float64)))).astype(int)
    lowest = exponents.min()
    assert module.lowest_exponent == lowest
    assert module.counts == np.bincount(exponents - lowest).tolist()
    assert (module.zeros, module.nonfinite) == (2, 3)


def test_large_gradients_are_counted_in_chunks(monkeypatch):
    """Counting a large gradient in chunks changes no count."""
    gradient = torch.randn(30, 7)
    whole = histogram_of(gradient)
    monkeypatch.setattr("halfstep.watching.exponents.CHUNK", 16)
    assert histogram_of(gradient) == whole


@looped(
    "exponent, scale, underflow, near_overflow",
    [
        (-24, 1.0, 0, 0),
        (-25, 1.0, 1, 0),
        (-25, 2.0, 0, 0),
        (13, 1.0, 0, 0),
        (14, 1.0, 0, 1),
        (0, 2.0**14, 0, 1),
    ],
)
def test_shares_are_those_at_the_scale_of_the_step(exponent, scale, underflow, near_overflow):
    """A loss scale of 2^k shifts every exponent by k against fp16's window. Shares of the
    unscaled gradients, which the backward pass never saw, would be detected.
    """
    counts = np.zeros(BINS, np.int64)
    counts[exponent + BIAS] = 3
    shares = describe("head", counts, scale)
    assert (shares.underflow, shares.near_overflow) == (underflow, near_overflow)


def test_a_module_without_gradients_has_an_empty_histogram():
    """A module without gradients has an empty histogram."""
    counts = np.zeros(BINS, np.int64)
    assert describe("head", counts, 1.0).counts == []


def test_a_run_samples_every_so_many_steps_and_before_the_clip(run_loop):
    """Histograms are of every nth step, at its scale, and not affected by the clip."""
    values = {
        "training": {"steps": 12, "max_grad_norm": 1e-6},
        "diagnosis": {"histogram_every_steps": 5},
        "scaler": {"init_scale": 64.0},
    }
    run = run_loop(Digits, values)
    assert [event["step"] for event in run.of("histogram")] == [5, 10]
    for event in run.of("histogram"):
        assert event["scale"] == 64.0
        assert [module["name"] for module in event["modules"]] == ["model.0", "model.3", "model.6"]
        sizes = [64 * 128 + 128, 128 * 128 + 128, 128 * 10 + 10]
        for module, size in zip(event["modules"], sizes, strict=True):
            assert sum(module["counts"]) + module["zeros"] + module["nonfinite"] == size
        top = max(m["lowest_exponent"] + len(m["counts"]) for m in event["modules"])
        assert top > -10


def test_none_is_taken_when_it_is_switched_off(run_loop):
    """An interval of 0 disables histograms of gradients."""
    values = {"diagnosis": {"histogram_every_steps": 0}}
    assert not run_loop(Regression, values).of("histogram")


def test_counting_is_not_sorted_under_deterministic_algorithms(monkeypatch):
    """Counting does not sort on CUDA under deterministic algorithms, and restores the setting."""
    seen = []
    original = torch.Tensor.scatter_add_

    def observe(self, *args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(self, *args)

    monkeypatch.setattr(torch.Tensor, "scatter_add_", observe)
    torch.use_deterministic_algorithms(True)
    try:
        histogram_of(torch.ones(2, 2))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False]


def test_gradients_in_fp64_are_counted_once():
    """Each element in fp64 is counted as one number."""
    [module] = histogram_of(torch.full((3, 4), 0.5)).modules
    assert sum(module.counts) == 12
    layer = torch.nn.Linear(4, 3, bias=False).double()
    layer.weight.grad = torch.full((3, 4), 0.5, dtype=torch.float64)
    optimizers = watch_optimizers({"model": layer}, {"sgd": torch.optim.SGD(layer.parameters())})
    events = []
    histogram = Histogram(optimizers, Diagnosis(histogram_every_steps=1), CPU, events.append)
    histogram.before_step(1)
    histogram.before_clip(optimizers["sgd"], optimizers["sgd"].one)
    zero = torch.zeros(())
    histogram.after_step(StepResult(zero, torch.tensor(1.0), {}, set()))
    assert events[0].modules == [module]
