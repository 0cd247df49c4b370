from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.operators import Operators
from tests.trainer.conftest import CPU, Pair, Regression, assert_same_bits
from trainer import ema as ema_module
from trainer.distributed.ranks import Control
from trainer.ema import Ema
from trainer.optimizers import watch_optimizers
from trainer.recipes.digits import Digits
from trainer.recipes.gpt import GPT

#: A scale at which the first steps and some later ones are skipped.
SKIPPING = {"scaler": {"init_scale": 2.0**24, "growth_interval": 5}}
WITH = {"training": {"steps": 30, "ema_decay": 0.9}}


class Followed(Digits):
    """A recipe that averages its weights after each step with torch's own functions."""

    def after_step(self):
        model = self.modules["model"]
        now = [weight.detach().clone() for weight in model.parameters()]
        if not hasattr(self, "average"):
            self.average, self.updates, self.before = None, 0, self.initial
        moved = any(not torch.equal(a, b) for a, b in zip(now, self.before, strict=True))
        self.before = now
        if moved:
            self.updates += 1
            decay = min(0.9, (1 + self.updates) / (10 + self.updates))
            for average, weight in zip(self.averages, now, strict=True):
                average.lerp_(weight, 1 - decay)

    def __init__(self, config, device):
        super().__init__(config, device)
        weights = self.modules["model"].parameters()
        self.initial = [weight.detach().clone() for weight in weights]
        self.averages = [weight.clone() for weight in self.initial]


def averages_of(path, name="model"):
    """Return the averages in a checkpoint."""
    return torch.load(path, weights_only=True)["parts"]["ema"]["weights"][name]


def test_it_is_the_average_of_what_the_updates_made(run_loop, tmp_path):
    """The average equals torch's lerp over applied steps, and skipped steps do not change it."""
    run = run_loop(Followed, WITH | SKIPPING, folder=tmp_path)
    assert len(run.list_skipped()) > 2
    saved = averages_of(tmp_path / "step-00000030.pt")
    assert run.recipe.updates == 30 - len(run.list_skipped())
    for average, expected in zip(saved.values(), run.recipe.averages, strict=True):
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-7)


def test_it_is_torchs_own_average_where_the_decay_has_grown(run_loop):
    """The average equals torch's AveragedModel with multi_avg_fn at a constant decay."""
    recipe = Regression(run_loop(Regression).recipe.config, CPU)
    optimizers = watch_optimizers(recipe.modules, recipe.optimizers)
    model = recipe.modules["model"]
    mine = Ema(0.15, recipe.modules, optimizers)  # below 2 / 11, with which it begins
    torchs = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.15))
    torchs.update_parameters(model)
    for _ in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        mine.update({"sgd": 0.0})
        torchs.update_parameters(model)
    averages = mine.state_dict()["weights"]["model"]
    for name, expected in torchs.module.named_parameters():
        torch.testing.assert_close(averages[name], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_no_bit_of_training_is_different(run_loop):
    """Averaging changes no weights, losses or metrics of the raw weights."""
    values = {"training": {"steps": 30}, "evaluation": {"every_steps": 10}}
    plain = run_loop(Noisy, values | SKIPPING)
    run = run_loop(Noisy, values | WITH | SKIPPING)
    assert_same_bits(run.weights(), plain.weights())
    assert run.records["loss"].tolist() == plain.records["loss"].tolist()
    raw = [e["value"] for e in run.of("metric", name="val/noise")]
    assert raw == [e["value"] for e in plain.of("metric", name="val/noise")]


class Noisy(Digits):
    """A recipe that draws global random numbers in evaluation, and reports its weights' size."""

    def evaluate(self):
        sizes = [weight.abs().sum() for weight in self.modules["model"].parameters()]
        return {"val/noise": torch.rand(()).item(), "val/size": torch.stack(sizes).sum().item()}


def test_it_is_evaluated_in_addition_to_the_weights(run_loop, tmp_path):
    """Metrics of averaged weights have the prefix ema/, and those of saved averages."""
    run = run_loop(Noisy, WITH, folder=tmp_path)
    names = {e["name"] for e in run.of("metric")}
    assert {"val/noise", "val/size", "ema/val/noise", "ema/val/size"} <= names
    [raw], [averaged] = (run.of("metric", name=f"{prefix}val/size") for prefix in ("", "ema/"))
    weights = averages_of(tmp_path / "step-00000030.pt").values()
    expected = torch.stack([weight.abs().sum() for weight in weights]).sum().item()
    assert averaged["value"] == pytest.approx(expected, rel=1e-6)
    assert averaged["value"] != raw["value"]


class Raising(Noisy):
    """A recipe whose second evaluation draws a random number and raises."""

    def evaluate(self):
        metrics = super().evaluate()
        if hasattr(self, "again"):
            raise ValueError("no room")
        self.again = True
        return metrics


@pytest.mark.slow
def test_an_evaluation_of_it_that_raises_ends_no_run(run_loop):
    """If evaluating the average raises, that is reported, and networks and random state are
    restored.
    """
    run = run_loop(Raising, WITH)
    plain = run_loop(Raising, {"training": {"steps": 30}})
    [result] = run.of("failed_diagnosis")
    assert (result["diagnosis"], result["error"]) == (
        "evaluation of the average",
        "ValueError: no room",
    )
    assert_same_bits(run.weights(), plain.weights())
    assert run.of("metric", name="val/size")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_resumed_run_continues_with_it_exactly(run_loop, tmp_path, precision):
    """The averages of a run resumed among skips equal an uninterrupted run's, to the last bit."""
    values = SKIPPING | WITH | {"precision": precision}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_loop(Digits, values, folder=whole)
    stops = iter([Control()] * 11 + [Control("pause")])
    run_loop(Digits, values, folder=cut, control=lambda: next(stops))
    [half] = cut.glob("*.pt")
    resumed = run_loop(Digits, values, folder=cut, resume=half)
    assert resumed.of("resumed")[0]["exact"]
    name = "step-00000030.pt"
    assert_same_bits(averages_of(cut / name), averages_of(whole / name))


def test_a_fork_may_begin_or_end_it(run_loop, tmp_path):
    """A fork that begins an average begins it with its initial weights."""
    run_loop(Regression, {}, folder=tmp_path)
    path = tmp_path / "step-00000005.pt"
    longer = {"steps": 6, "ema_decay": 0.5}
    fork = run_loop(Regression, {"training": longer}, folder=tmp_path, resume=path)
    before = torch.load(path, weights_only=True)["modules"]["model"]
    for name, average in averages_of(tmp_path / "step-00000006.pt").items():
        expected = before[name].lerp(fork.recipe.modules["model"].state_dict()[name], 9 / 11)
        torch.testing.assert_close(average, expected)
    back = tmp_path / "step-00000006.pt"
    assert run_loop(Regression, {"training": {"steps": 7}}, resume=back).outcome.step == 7


class Normed(Regression):
    """A recipe with buffers, and a weight under two names."""

    def __init__(self, config, device):
        super().__init__(config, device)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 1))
        model[2].weight = model[0].weight
        self.modules = {"model": model}
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=0.1, fused=True)}


def test_a_file_of_its_own_loads_into_the_module(run_loop, tmp_path):
    """The file of averages loads into the module, with tied weights twice and unchanged buffers."""
    run = run_loop(Normed, WITH, folder=tmp_path)
    [saved] = run.of("checkpoint")
    assert [file["kind"] for file in saved["files"]] == ["checkpoint", "weights", "ema"]
    loaded = load_file(tmp_path / "step-00000030.ema.safetensors")
    state = run.recipe.modules["model"].state_dict()
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["1.running_mean"], state["1.running_mean"])
    assert torch.equal(loaded["0.weight"], loaded["2.weight"])
    assert not torch.equal(loaded["0.weight"], state["0.weight"])
    assert_same_bits({**loaded}, state | averages_of(tmp_path / "step-00000030.pt"))


class Two(Pair):
    """A recipe whose second optimizer is skipped in every step."""

    name: ClassVar = "two"

    def training_step(self, batch):
        for loss in super().training_step(batch):
            if loss.optimizer == "adam":
                loss.value.mul_(torch.inf)
            yield loss


def test_each_optimizer_counts_its_own_updates(run_loop, tmp_path):
    """An optimizer that never steps has its initial weights as average, whatever others do."""
    run = run_loop(Two, WITH | {"scaler": {"init_scale": 1.0}}, folder=tmp_path)
    state = torch.load(tmp_path / "step-00000030.pt", weights_only=True)["parts"]["ema"]
    assert {name: int(count) for name, count in state["updates"].items()} == {"sgd": 30, "adam": 0}
    assert_same_bits(state["weights"]["second"], run.recipe.modules["second"].state_dict())
    kinds = [file["kind"] for file in run.of("checkpoint")[0]["files"]]
    assert kinds == ["checkpoint", "weights.model", "ema.model", "weights.second", "ema.second"]


def test_a_retry_that_is_applied_is_an_update(run_loop, tmp_path):
    """A step that was skipped in fp16 and applied by a retry in fp32 updates the average."""
    values = WITH | {"scaler": {"init_scale": 2.0**24, "retry_in_fp32": True}}
    run = run_loop(Digits, values, folder=tmp_path)
    assert run.of("retry", applied=True)
    state = torch.load(tmp_path / "step-00000030.pt", weights_only=True)["parts"]["ema"]
    assert int(state["updates"]["adamw"]) == 30


def test_an_update_is_as_many_operations_however_many_weights(monkeypatch):
    """The number of operations for an average's update does not depend on the number of weights."""

    def operations(parameters):
        weights = [nn.Parameter(torch.randn(4)) for _ in range(parameters)]
        modules = {"model": nn.ParameterList(weights)}
        optimizers = {"sgd": torch.optim.SGD(weights, lr=0.1)}
        ema = Ema(0.9, modules, watch_optimizers(modules, optimizers))
        with Operators() as operators:
            ema.update({"sgd": torch.zeros(())})
        return operators.counts.total()

    assert operations(3) == operations(300) < 15
    before = operations(3)
    monkeypatch.setattr(ema_module, "CHUNK_ELEMENTS", 4)
    assert operations(3) == before + 6


@pytest.mark.slow
def test_tied_weights_of_a_transformer(run_loop, tmp_path):
    """A bf16 transformer with tied weights has fp32 averages, and their file loads."""
    values = {
        "precision": "bf16",
        "training": {"steps": 2, "batch_size": 2, "ema_decay": 0.9},
        "recipe": {"layers": 1, "heads": 2, "width": 16, "context": 8},
    }
    run = run_loop(GPT, values, folder=tmp_path)
    run.recipe.modules["model"].load_state_dict(
        load_file(tmp_path / "step-00000002.ema.safetensors")
    )


def test_an_update_never_waits_for_the_device():
    """An update of averages never reads a value, as torch's meta device shows."""
    model = nn.Linear(4, 4, device="meta")
    optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=0.1)}
    modules = {"model": model}
    ema = Ema(0.9, modules, watch_optimizers(modules, optimizers))
    ema.update({"sgd": torch.zeros((), device="meta")})
    assert ema.state_dict()["weights"]["model"]["weight"].is_meta
