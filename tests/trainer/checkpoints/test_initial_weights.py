"""A run that starts from weights."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfstep.run_config import ConfigError, parse_config
from tests.site import type_train as main
from tests.spool_made import fields_of
from tests.trainer.conftest import Pair, Regression, assert_same_bits
from trainer.checkpoints.initial_weights import load_weights

ONE_STEP = {"training": {"steps": 1}, "recipe": {"learning_rate": 1e-30}}


class Kept(Regression):
    """A recipe that stores its weights from before the first step."""

    def batch(self, indices, generator):
        if not hasattr(self, "first"):
            state = self.modules["model"].state_dict()
            self.first = {name: each.clone() for name, each in state.items()}
        return super().batch(indices, generator)


def other_weights():
    """Return new random weights of a network like Regression's."""
    torch.manual_seed(99)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return {name: each.detach().clone() for name, each in network.state_dict().items()}


def start(run_loop, path, recipe=Kept, **weights):
    return run_loop(recipe, ONE_STEP | {"weights": {"path": str(path), **weights}})


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module.model.", "backbone.net."])
def test_names_are_told_apart_from_what_wraps_them(run_loop, tmp_path, prefix):
    """Weights are matched although a wrapper has prefixed their names."""
    weights = other_weights()
    path = tmp_path / "net.safetensors"
    save_file({f"{prefix}{name}": each for name, each in weights.items()}, path)
    run = start(run_loop, path)
    assert_same_bits(run.recipe.first, weights)
    [event] = run.of("weights")
    assert (event["loaded"], event["count"], event["source"]) == (4, 4, str(path))
    assert (event["missing"], event["unexpected"], event["mismatched"]) == ([], [], [])


@pytest.fixture
def fitted(tmp_path):
    """Return a function that returns the result of load_weights for weights and modules."""

    def load(weights, modules):
        torch.save(weights, tmp_path / "net.pt")
        paths = {"": tmp_path / "net.pt"}
        event, trouble = load_weights(paths, modules, source="net.pt", is_strict=True)
        return fields_of(event), trouble

    return load


def test_a_network_within_a_network(fitted):
    """If the recipe wraps the saved network, names get the missing prefix."""
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = nn.Module()
    outer.backbone = inner
    with torch.no_grad():
        inner[0].weight.zero_()
    names = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    event, trouble = fitted(names, {"model": outer})
    assert trouble == ""
    assert event["loaded"] == 2
    assert torch.equal(inner[0].weight, torch.ones(2, 2))


def test_several_modules_by_their_names(run_loop, tmp_path):
    """Weights of several modules load from one file with prefixed names, or from a file each."""
    first, second = other_weights(), {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    parts = {"model": first, "second": second}
    whole = {f"{name}.{key}": each for name, part in parts.items() for key, each in part.items()}
    save_file(whole, tmp_path / "net.safetensors")
    values = {"training": {"steps": 1}, "recipe": {"learning_rate": 1e-30}}
    values["weights"] = {"path": str(tmp_path / "net.safetensors")}
    [event] = run_loop(Pair, values).of("weights")
    assert (event["loaded"], event["count"]) == (6, 6)
    paths = {}
    for name, part in parts.items():
        paths[name] = tmp_path / f"net.{name}.safetensors"
        save_file(part, paths[name])
    values["weights"] = {"run": 3, "step": 20}
    [event] = run_loop(Pair, values, weights=paths).of("weights")
    assert (event["loaded"], event["source"]) == (6, "run 3 at step 20")


@pytest.fixture
def unfitting(tmp_path):
    """Write a file that lacks one weight, has an extra one and one of another shape."""
    weights = other_weights()
    del weights["0.bias"]
    weights |= {"2.weight": torch.ones(5, 8), "9.weight": torch.ones(1)}
    save_file(weights, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_weights_that_do_not_fit_are_reported_and_fail_the_run(run_loop, unfitting):
    """By default weights that do not fit fail the run, with names and shapes in the message."""
    with pytest.raises(ConfigError) as raised:
        start(run_loop, unfitting)
    for part in (
        "missing: model.0.bias",
        "unexpected: model.9.weight",
        "of another shape: model.2.weight: 5 × 8, not 1 × 8",
        "set weights.strict to off",
    ):
        assert part in str(raised.value)


def test_weights_that_do_not_fit_are_reported_and_left_out(run_loop, unfitting):
    """With weights.strict off the matching weights load; the others keep the recipe's values."""
    drawn = run_loop(Kept, ONE_STEP).recipe.first
    run = start(run_loop, unfitting, strict=False)
    expected = {"0.weight": other_weights()["0.weight"], "0.bias": drawn["0.bias"]}
    expected |= {"2.weight": drawn["2.weight"], "2.bias": other_weights()["2.bias"]}
    assert_same_bits(run.recipe.first, expected)
    [event] = run.of("weights")
    assert event["missing"] == ["model.0.bias"]
    assert event["unexpected"] == ["model.9.weight"]
    assert event["mismatched"] == ["model.2.weight: 5 × 8, not 1 × 8"]
    assert (event["loaded"], event["missing_count"]) == (2, 1)


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_of_another_network_altogether(run_loop, tmp_path, strict):
    """A file without any matching weight name is rejected, strict or not."""
    save_file({"stem.kernel": torch.ones(3)}, tmp_path / "net.safetensors")
    with pytest.raises(
        ConfigError, match=r"no weight of .* matches .* it has stem.kernel; the recip"
    ):
        start(run_loop, tmp_path / "net.safetensors", strict=strict)


def test_a_tied_weight_need_not_be_there_twice(fitted):
    """A tied weight may be saved once, as Hugging Face does."""
    network = nn.ModuleDict({"wte": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    network["head"].weight = network["wte"].weight
    event, trouble = fitted({"wte.weight": torch.ones(4, 2)}, {"model": network})
    assert (trouble, event["missing"]) == ("", [])
    assert torch.equal(network["head"].weight, torch.ones(4, 2))


def test_quantised_weights_are_rejected(fitted):
    """Quantised weights are rejected, since integers would be loaded as floats."""
    network = nn.Linear(2, 2)
    weights = {"weight": torch.ones(2, 2, dtype=torch.int8), "bias": torch.ones(2)}
    event, trouble = fitted(weights, {"model": network})
    assert event["mismatched"] == ["model.weight: int8, not float32"]
    assert "do not match" in trouble


def test_weights_in_half_precision_become_the_modules_type(fitted):
    """Weights in half precision are converted to the module's fp32."""
    network = nn.Linear(2, 2)
    weights = {name: torch.full_like(each, 0.5).half() for name, each in network.named_parameters()}
    _event, trouble = fitted(weights, {"model": network})
    assert trouble == ""
    assert torch.equal(network.weight, torch.full((2, 2), 0.5))


def test_a_resumed_run_has_its_own(run_loop, tmp_path):
    """A resumed run does not load its initial weights again, and may lack their file."""
    path = tmp_path / "net.safetensors"
    save_file(other_weights(), path)
    values = {"training": {"steps": 2}, "weights": {"path": str(path)}}
    whole = run_loop(Regression, values, folder=tmp_path / "a")
    state = torch.load(tmp_path / "a" / "step-00000002.pt", weights_only=True)
    path.unlink()
    values["training"] = {"steps": 4}
    values["weights"] = {"path": str(path)}
    resumed = run_loop(Regression, values, resume=tmp_path / "a" / "step-00000002.pt")
    assert whole.of("weights")
    assert resumed.of("weights") == []
    assert resumed.of("resumed")[0]["notes"] == ["training.steps was 2, is 4"]
    assert state["config"]["weights"]["path"] == str(path)


def test_settings_name_one_source(run_loop):
    """Initial weights come from a path or from a run; a step requires a run."""
    for weights, message in (
        ({"path": "a.pt", "run": 3}, "allowed: one of path, upload, run"),
        ({"upload": "net.pt"}, "allowed: text that matches"),
        ({"step": 3}, "step is 3, but run is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(Regression, {"weights": weights})
    with pytest.raises(ConfigError, match="which only the server can read"):
        run_loop(Regression, {"weights": {"run": 3}})


def test_at_a_terminal(capsys, tmp_path):
    """A training in a terminal prints loaded weights; a missing file gets no traceback."""
    words = ["digits", "--precision", "fp32", "--set", "training.steps=1"]
    main([*words, "--checkpoints", str(tmp_path)])
    path = tmp_path / "step-00000001.safetensors"
    main([*words, "--set", f"weights.path={path}"])
    assert f"started from {path}: 6 of 6 weights" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["digits", "--set", "weights.path=gone.pt"])
    assert "error: gone.pt does not exist" in capsys.readouterr().err
