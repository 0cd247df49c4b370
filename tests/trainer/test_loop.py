from threading import Thread

import numpy as np
import pytest
import torch

from halfstep.recipe import Loss, RecipeError
from halfstep.run_config import ConfigError, parse_config
from halfstep.telemetry.events import Checkpoint
from tests.marks import extended
from tests.trainer.conftest import CPU, Pair, Regression, assert_same_bits, bare_loop
from trainer.checkpoints import checkpoint
from trainer.distributed.ranks import Control, Request
from trainer.loop import train
from trainer.optimizers import WatchedOptimizer
from trainer.recipes import mlp
from trainer.recipes.digits import Digits
from trainer.recipes.mlp import MLP
from trainer.schedule import learning_rate_factor
from trainer.setup import one_at_a_time, prepare_run
from trainer.step import make_scaler

#: Digits with as many skips and growths as at the default width, in half the time.
NARROW = {"recipe": {"width": 32}}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", *extended(["bf16", "fp32"])])
def test_digits_reach_95_percent_in_every_precision(run_loop, precision):
    """In every precision 400 default steps classify 95 % of the validation images."""
    run = run_loop(Digits, {"precision": precision})
    accuracy = run.of("metric", name="val/accuracy", step=400)[0]["value"]
    assert accuracy >= 0.95
    assert run.outcome.status == "finished"
    assert run.records["step"].tolist() == list(range(1, 401))
    assert bool(run.of("scaler")) == (precision == "fp16")


@pytest.mark.slow
def test_the_scale_falls_exactly_at_skips_and_nowhere_else(run_loop):
    """In fp16 the scale halves after a skip, doubles at a growth, and otherwise stays."""
    values = {"training": {"steps": 150, "batch_size": 8}, "scaler": {"growth_interval": 30}}
    run = run_loop(Digits, values | NARROW)
    scale, skipped = run.records["scale"], set(run.list_skipped())
    grown = {event["step"] for event in run.of("scaler", kind="growth")}
    assert len(skipped) > 1
    assert len(grown) > 1
    for step, before, after in zip(run.records["step"], scale[:-1], scale[1:], strict=False):
        factor = 0.5 if step in skipped else 2 if step in grown else 1
        assert after == before * factor
    assert skipped == {event["step"] for event in run.of("scaler", kind="backoff")}
    assert skipped == {event["step"] for event in run.of("scaler", kind="skip")}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_skip_flags_are_the_truth_and_skipped_steps_change_no_weight(monkeypatch, fused):
    """A step is flagged exactly if the scaler found inf or NaN, and then changes no weight."""
    truth, before, unchanged, records = [], {}, [], []
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def spy(gradients, found_inf, inverse_scale):
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        kernel(gradients, found_inf, inverse_scale)
        assert bool(found_inf) is not finite
        truth.append(not finite)

    class Observed(Digits):
        def batch(self, indices, generator):
            weights = {k: v.clone() for k, v in self.modules["model"].state_dict().items()}
            if before:
                unchanged.append(all(torch.equal(weights[k], before[k]) for k in weights))
            before.update(weights)
            return super().batch(indices, generator)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", spy)
    values = {
        "training": {"steps": 150, "fused": fused, "batch_size": 8},
        "diagnosis": {"replay_skips": 0},  # a replay draws its batch again
        **NARROW,
    }
    train(
        prepare_run(
            Observed,
            parse_config(Observed, values),
            device=CPU,
            on_steps=lambda steps: records.extend(steps["flags"] & 1),
            on_event=lambda event: None,
        )
    )
    assert records == truth
    assert unchanged == truth[:-1]
    assert sum(truth) > 2


@pytest.mark.slow
def test_the_loop_computes_what_the_plain_recipe_computes(run_loop):
    """With telemetry the weights equal those of PyTorch's documented loop, bit for bit."""
    values = {"training": {"steps": 60, "max_grad_norm": 0.5}}
    run = run_loop(Digits, values)

    bare = bare_loop(Digits, values)
    assert_same_bits(run.weights(), bare.weights())
    assert_same_bits(run.recipe.scaler.state_dict(), bare.recipe.scaler.state_dict())


def test_the_clip_acts_on_unscaled_gradients(run_loop):
    """At any scale the recorded norm is the true one, and the clipped norm is at the limit."""
    clipped = [
        run_loop(
            Digits,
            {"training": {"steps": 1, "max_grad_norm": 0.25}, "scaler": {"init_scale": scale}},
        ).records
        for scale in (1.0, 1024.0)
    ]
    first, second = (records[0] for records in clipped)
    assert first["grad_norm"] > 0.25
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-2)
    assert second["grad_norm_clipped"] == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_the_clip_by_value_acts_on_unscaled_gradients_after_the_clip_by_norm(
    run_loop, monkeypatch, max_grad_norm
):
    """The clip by value limits unscaled gradients after the clip by norm, whose norm is recorded. A
    clip of scaled gradients, which at this scale would flatten all of them, would be detected.
    """
    reached = []
    original = WatchedOptimizer.step

    def observe(self, scaler):
        reached.append(torch.cat([p.grad.flatten().clone() for p in self.parameters]))
        return original(self, scaler)

    monkeypatch.setattr(WatchedOptimizer, "step", observe)
    training = {"steps": 3, "max_grad_value": 0.01, "max_grad_norm": max_grad_norm}
    values = {"training": training, "scaler": {"init_scale": 1024.0}}
    run = run_loop(Digits, values)
    for record, gradients in zip(run.records, reached, strict=True):
        assert gradients.abs().max() == pytest.approx(0.01)
        assert gradients.abs().median() < 0.005
        assert record["grad_norm_clipped"] == pytest.approx(gradients.norm().item(), rel=1e-5)
        assert record["grad_norm_clipped"] < record["grad_norm"]


@pytest.mark.slow
def test_a_compiled_network_trains_and_is_saved_under_its_own_names(
    run_loop, tmp_path, monkeypatch
):
    """With a compiled network optimizer, culprits and checkpoint have the names of the plain
    network.

    Catches names that begin with "_orig_mod.", which would load nowhere else.
    """
    compiled = []
    original = torch.compile

    def without_code_generation(module):
        compiled.append(module)
        return original(module, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code_generation)
    values = {"training": {"steps": 8, "compile": True}, "scaler": {"init_scale": 2.0**24}}
    run = run_loop(Digits, values, folder=tmp_path)
    assert compiled == [run.recipe.modules["model"]._orig_mod]
    names = checkpoint.load(tmp_path / "step-00000008.pt")["modules"]["model"].keys()
    assert "0.weight" in names
    assert run.of("scaler")[0]["culprits"][0]["name"] == "model.0.weight"
    plain = run_loop(Digits, values | {"training": {"steps": 8}})
    np.testing.assert_allclose(run.records["loss"], plain.records["loss"], rtol=1e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_the_compiler_gets_the_mode(run_loop, monkeypatch, mode):
    """Each network is compiled once with the configured mode; CUDA graphs get a mark in each
    step.
    """
    asked, steps = [], []

    def compile_module(module, mode="default"):
        asked.append(mode)
        return module

    monkeypatch.setattr(torch, "compile", compile_module)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    run_loop(Regression, {"training": {"steps": 3, "compile": True, "compile_mode": mode}})
    assert asked == [mode]
    assert len(steps) == (0 if mode == "default" else 3)


def test_accumulation_equals_one_big_batch(run_loop):
    """In fp32, four micro-batches of 8 train like one batch of 32: each example counts once."""
    whole = run_loop(Regression, {"training": {"batch_size": 32}})
    parts = run_loop(Regression, {"training": {"batch_size": 8, "accumulation_steps": 4}})
    for name, weight in whole.weights().items():
        torch.testing.assert_close(parts.weights()[name], weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts.records["loss"], whole.records["loss"], rtol=1e-5)
    np.testing.assert_allclose(parts.records["grad_norm"], whole.records["grad_norm"], rtol=1e-5)


def test_two_optimizers_share_one_scaler(run_loop):
    """With a shared scaler each optimizer skips separately; one skip halves the scale."""
    run = run_loop(Pair, {"scaler": {"init_scale": 2.0**17}, "training": {"steps": 40}})
    skips = run.of("scaler", kind="skip")
    by_optimizer = {name: {e["step"] for e in skips if e["optimizer"] == name} for name in
                    ("sgd", "adam")}  # fmt: skip
    assert by_optimizer["adam"] - by_optimizer["sgd"]
    flags = dict(zip(run.records["step"].tolist(), run.records["flags"].tolist(), strict=True))
    for step, flag in flags.items():
        assert bool(flag & 1 << 8) == (step in by_optimizer["sgd"])
        assert bool(flag & 1 << 9) == (step in by_optimizer["adam"])
        assert bool(flag & 1) == bool(flag >> 8)
    culprits = {c["name"] for e in skips if e["optimizer"] == "adam" for c in e["culprits"]}
    assert culprits <= {"second.weight", "second.bias"}
    assert {e["step"] for e in run.of("scaler", kind="backoff")} == set(run.list_skipped())


def test_the_second_loss_sees_the_first_step(run_loop):
    """After a yield the previous loss's optimizer has stepped."""
    seen = []

    class Watching(Pair):
        def training_step(self, batch):
            before = self.modules["model"][0].weight.clone()
            losses = super().training_step(batch)
            yield next(losses)
            seen.append(torch.equal(before, self.modules["model"][0].weight))
            yield from losses

    run = run_loop(Watching, {"precision": "fp32", "training": {"steps": 2}})
    assert seen == [False, False]
    assert run.outcome.step == 2


def test_autocast_covers_the_forward_pass_and_not_the_backward(run_loop):
    """A training step runs under autocast with the chosen dtype, its backward hooks do not."""
    seen = {}

    class Watching(Regression):
        def training_step(self, batch):
            seen["forward"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            for loss in super().training_step(batch):
                loss.value.register_hook(
                    lambda g: seen.update(backward=torch.is_autocast_enabled("cpu"))
                )
                yield loss

    run_loop(Watching, {"precision": "bf16", "training": {"steps": 1}})
    assert seen == {"forward": (True, torch.bfloat16), "backward": False}


def test_a_nan_loss_is_recorded_and_not_hidden(run_loop):
    """A step with a NaN loss is recorded with its flag, and skipped in fp16."""

    class Broken(Digits):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                yield Loss(loss.value * float("nan"), loss.optimizer)

    run = run_loop(Broken, {"training": {"steps": 3}, "evaluation": {"every_steps": None}})
    assert np.isnan(run.records["loss"]).all()
    assert (run.records["flags"] & 3 == 3).all()
    assert all(event["loss_nonfinite"] for event in run.of("scaler"))


def test_a_norm_that_overflows_is_not_a_skip(run_loop):
    """Finite gradients with an infinite L2 norm are flagged, and the step is applied."""

    class Huge(Regression):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                yield Loss(loss.value * 1e25, loss.optimizer)

    run = run_loop(Huge, {"training": {"steps": 1}})
    assert np.isinf(run.records["grad_norm"][0])
    assert run.records["flags"][0] == 4


def test_a_scaler_that_switches_itself_off_is_an_error(recwarn):
    """A scaler that disables itself is an error, so fp16 never trains without scaling."""
    if torch.cuda.is_available():
        pytest.skip("the scaler stays on where CUDA is available")
    with (
        pytest.warns(UserWarning, match="CUDA is not available"),
        pytest.raises(RuntimeError, match="disabled itself on cuda"),
    ):
        make_scaler(parse_config(Digits, {}), torch.device("cuda"))


def test_the_scaler_takes_every_setting():
    """The scaler has the configured scale, factors and interval, in fp16 only."""
    settings = {
        "init_scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
    }
    scaler = make_scaler(parse_config(Digits, {"scaler": settings}), CPU)
    assert scaler.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }
    for off in ({"precision": "bf16"}, {"precision": "fp32"}, {"scaler": {"enabled": False}}):
        assert not make_scaler(parse_config(Digits, off), CPU).is_enabled()


def test_a_batch_larger_than_the_data_is_rejected(run_loop):
    """A batch larger than the data is rejected with field, value and allowed values."""
    message = (
        "training.batch_size is 5000, but digits has 1437 training examples: choose at most 1437"
    )
    with pytest.raises(ConfigError, match=message):
        run_loop(Digits, {"training": {"batch_size": 5000}})
    with pytest.raises(ConfigError, match=r"64 × 30 accumulation steps, but .* at most 47"):
        run_loop(Digits, {"training": {"batch_size": 64, "accumulation_steps": 30}})


def test_cuda_without_cuda_is_rejected():
    """CUDA on a machine without it is an error, and not a silent CPU run."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="no usable CUDA device"):
        train(
            prepare_run(
                Digits,
                parse_config(Digits, {}),
                device=torch.device("cuda"),
                on_steps=lambda steps: None,
                on_event=lambda event: None,
            )
        )


class Half(Regression):
    """A recipe with half-precision weights."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"].half()


class Stranger(Regression):
    """A recipe that optimizes a parameter of no module."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.optimizers["sgd"].add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


class Detached(Regression):
    """A recipe whose loss does not depend on the optimizer's parameters."""

    def training_step(self, batch):
        yield Loss(torch.ones((), requires_grad=True) * 2, "sgd")


class Misnamed(Regression):
    """A recipe that names an unknown optimizer."""

    def training_step(self, batch):
        for loss in super().training_step(batch):
            yield Loss(loss.value, "adam")


class Twice(Regression):
    """A recipe that yields two losses for one optimizer."""

    def training_step(self, batch):
        yield from super().training_step(batch)
        yield from super().training_step(batch)


class Unreduced(Regression):
    """A recipe that yields a loss for each example."""

    def training_step(self, batch):
        for loss in super().training_step(batch):
            yield Loss(loss.value.expand(8), "sgd")


class Silent(Regression):
    """A recipe that yields nothing."""

    def training_step(self, batch):
        yield from ()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Half, "parameter model.0.weight is torch.float16: leave the model in torch.float32"),
        (Stranger, r'optimizer "sgd" has parameters of shape \(3,\) that are in none'),
        (Detached, "the loss gave no parameter of its optimizer a gradient: model.0.weight"),
        (Misnamed, 'a loss names optimizer "adam"; allowed: sgd'),
        (Twice, 'training_step yields two losses for optimizer "sgd": add them'),
        (Unreduced, r'the loss of "sgd" has shape \(8,\): yield a scalar'),
        (Silent, "training_step yields no loss"),
    ],
)
def test_a_recipe_that_cannot_be_trained_is_explained(run_loop, recipe, message):
    """Each mistake of a recipe that PyTorch accepts silently, or explains badly, has its own
    message.
    """
    with pytest.raises(RecipeError, match=message):
        run_loop(recipe)


@pytest.mark.parametrize(
    ("stop", "status"), [("cancel", "cancelled"), ("pause", "paused"), ("preempt", "preempted")]
)
def test_a_stop_is_executed_at_the_next_step_and_leaves_a_checkpoint(
    run_loop, tmp_path, stop, status
):
    """A stop finishes the current step, records and saves it, and does nothing more."""
    asked = []

    def control():
        asked.append(1)
        return Control(stop if len(asked) == 7 else None)

    run = run_loop(Digits, folder=tmp_path, control=control)
    assert (run.outcome.status, run.outcome.step) == (status, 7)
    assert run.records["step"][-1] == 7
    assert [(e["step"], e["reason"]) for e in run.of("checkpoint")] == [(7, stop)]


def test_checkpoints_come_at_intervals_on_request_and_at_the_end(run_loop, tmp_path):
    """Each checkpoint has its reason, and a requested one the request's id."""
    requests = iter([None] * 6 + [Request(41, "checkpoint")] + [None] * 100)
    run = run_loop(
        Digits,
        {"training": {"steps": 11}, "checkpoints": {"every_steps": 5}},
        folder=tmp_path / "checkpoints",
        control=lambda: Control(request=next(requests)),
    )
    saved = [(e["step"], e["reason"], e["request"]) for e in run.of("checkpoint")]
    assert saved == [(5, "interval", None), (7, "request", 41), (10, "interval", None),
                     (11, "end", None)]  # fmt: skip
    file = run.of("checkpoint")[0]["files"][0]
    assert file["path"] == "checkpoints/step-00000005.pt"
    assert (tmp_path / file["path"]).stat().st_size == file["size_bytes"]


def test_every_record_before_a_checkpoint_is_out_before_it(tmp_path):
    """All steps before a checkpoint are delivered before its event."""
    order = []

    def on_event(event):
        if isinstance(event, Checkpoint):
            order.append(("saved", event.step))

    train(
        prepare_run(
            Digits,
            parse_config(Digits, {"training": {"steps": 20}, "checkpoints": {"every_steps": 10}}),
            device=CPU,
            on_steps=lambda steps: order.extend(steps["step"].tolist()),
            on_event=on_event,
            checkpoint_folder=tmp_path,
        )
    )
    assert set(range(1, 11)) <= set(order[: order.index(("saved", 10))])
    assert order[-1] == ("saved", 20)
    assert len(order) == 22


def test_threads_report_one_at_a_time():
    """Steps are reported after an event is written, so that their frames do not interleave."""
    order = []

    def on_event(event):
        order.append("event begins")
        steps.start()
        steps.join(0.1)  # it must wait for us, although it has time not to
        order.append("event ends")

    tell_steps, tell_event = one_at_a_time(lambda reported: order.append("steps"), on_event)
    steps = Thread(target=tell_steps, args=[[]])
    tell_event({})
    steps.join()
    assert order == ["event begins", "event ends", "steps"]


def test_steps_before_an_error_are_handed_over(run_loop):
    """A recipe that raises loses none of its completed steps."""
    recorded = []

    class Failing(Regression):
        batches_left = 3

        def batch(self, indices, generator):
            if self.batches_left == 0:
                raise ZeroDivisionError
            self.batches_left -= 1
            return super().batch(indices, generator)

    with pytest.raises(ZeroDivisionError):
        train(
            prepare_run(
                Failing,
                parse_config(Failing, {}),
                device=CPU,
                on_steps=lambda steps: recorded.extend(steps["step"].tolist()),
                on_event=lambda event: None,
            )
        )
    assert recorded == [1, 2, 3]


def test_the_learning_rate_counts_attempted_steps():
    """The learning rate warms up to its peak, and falls by a cosine to 0 at the last step."""
    training = parse_config(
        Regression, {"training": {"steps": 10, "warmup_steps": 2, "schedule": "cosine"}}
    ).training
    factors = [learning_rate_factor(training, step) for step in range(1, 11)]
    assert factors[:3] == pytest.approx([0.5, 1.0, 0.5 * (1 + np.cos(np.pi / 8))])
    assert factors[6 - 1] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx(0)
    constant = parse_config(Regression, {"training": {"warmup_steps": 5, "steps": 5}}).training
    assert [learning_rate_factor(constant, step) for step in (1, 5)] == [0.2, 1.0]


def test_the_recorded_learning_rate_is_the_one_used(run_loop):
    """The learning rate in the records is the scheduled one of each attempted step."""
    values = {"training": {"warmup_steps": 4}, "recipe": {"learning_rate": 0.1}}
    run = run_loop(Regression, values)
    assert run.records["lr"] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_the_benchmark_reports_time_and_memory(run_loop):
    """A small mlp benchmark reports total seconds and peak bytes."""
    values = {"recipe": {"width": 16, "batches": 3}, "training": {"steps": 9, "batch_size": 4}}
    run = run_loop(MLP, values)
    metrics = {event["name"]: event["value"] for event in run.of("metric")}
    assert metrics.keys() == {"run/seconds", "run/peak_memory_bytes"}
    assert 0 < metrics["run/seconds"] < 60
    assert metrics["run/peak_memory_bytes"] > 2**20
    assert len(run.records) == 9


@pytest.mark.slow
def test_a_run_repeats_itself_bit_for_bit(run_loop):
    """A run with the same seed has the same weights, and another seed has others."""
    values = {"training": {"steps": 20}, "recipe": {"dropout": 0.3, "shift_pixels": 1}}
    first, again = run_loop(Digits, values), run_loop(Digits, values)
    assert_same_bits(first.weights(), again.weights())
    values["training"]["seed"] = 1
    other = run_loop(Digits, values)
    assert not torch.equal(other.weights()["model.0.bias"], first.weights()["model.0.bias"])


@pytest.mark.extended
def test_the_benchmark_prints_the_tutorials_table(capfd, monkeypatch):
    """The benchmark runs each precision in a process, with ratios to the first row."""
    rows = {name: mlp.ROWS[name] for name in ("fp32", "bf16")}
    monkeypatch.setattr(mlp, "ROWS", rows)
    sizes = ("recipe.width=16", "recipe.batches=2", "training.batch_size=4", "training.steps=3")
    mlp.print_table([word for size in sizes for word in ("--set", size)])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| fp32", "| bf16"]
    assert "| 1.00× |" in lines[2]
