"""Optimizers and learning rates of recipes."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from halfstep.recipe import RecipeError
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.optimizers import check_kind, prepare_momentum

SKIPPING = {"precision": "fp16", "scaler": {"init_scale": 2.0**40}, "training": {"steps": 60}}


def with_optimizer(make):
    """Return a recipe with this optimizer for its parameters."""

    class Made(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            made = make(self.modules["model"].parameters(), config)
            self.optimizers = {"sgd": made}

    return Made


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_a_fused_sgd_survives_a_first_step_that_is_skipped(run_loop, nesterov):
    """After a skipped first step fused and unfused SGD with momentum have equal losses."""

    def sgd(fused):
        return with_optimizer(
            lambda parameters, _: torch.optim.SGD(
                parameters, lr=0.01, momentum=0.9, nesterov=nesterov, fused=fused
            )
        )

    rubbish = [torch.full((64,), torch.nan) for _ in range(200)]  # what freed memory may hold
    del rubbish
    fused, unfused = run_loop(sgd(True), SKIPPING), run_loop(sgd(False), SKIPPING)
    assert fused.records["flags"][0] & 1
    assert torch.isfinite(fused.recipe.modules["model"][0].weight).all()
    torch.testing.assert_close(fused.weights(), unfused.weights(), rtol=1e-3, atol=1e-4)


def test_momentum_is_prepared_only_for_fused_sgd():
    """Fused SGD's momentum begins with zeros; existing momentum is unchanged."""
    layer = nn.Linear(2, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)
    plain = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    adam = torch.optim.Adam(layer.parameters(), fused=True)
    prepare_momentum({"sgd": sgd, "plain": plain, "adam": adam})
    assert [state["momentum_buffer"].abs().sum() for state in sgd.state.values()] == [0, 0]
    assert not plain.state
    assert not adam.state


def test_dampening_of_a_fused_sgd_is_rejected(run_loop):
    """A fused SGD with dampening is rejected: momentum of zeros would be dampened at once."""
    damped = with_optimizer(
        lambda parameters, _: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, dampening=0.1, fused=True
        )
    )
    with pytest.raises(RecipeError, match="Set dampening to 0 or fused to False"):
        run_loop(damped, SKIPPING)
    run_loop(damped, {"training": {"steps": 2}})  # fp32 skips nothing


def test_an_argument_that_is_not_an_optimizer_is_named():
    """The error for an object that is no optimizer has its type and the allowed ones."""
    with pytest.raises(RecipeError, match='optimizer "adam" is a Linear; allowed: a torch'):
        check_kind("adam", nn.Linear(1, 1))
    with pytest.raises(RecipeError, match="evaluates the loss several times per step"):
        check_kind("lbfgs", torch.optim.LBFGS(nn.Linear(1, 1).parameters()))


def test_an_optimizer_without_a_fused_kernel_is_reported(run_loop):
    """An optimizer without a fused kernel is reported with the argument to leave out."""
    fused = with_optimizer(lambda p, config: torch.optim.RMSprop(p, fused=config.training.fused))
    with pytest.raises(RecipeError, match="has no fused form; leave out fused="):
        run_loop(fused)


class Scheduled(Regression):
    """A recipe with its own scheduler, stepped once in each step."""

    name: ClassVar = "scheduled"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers["sgd"], 2, 0.5)

    def after_step(self):
        self.schedule.step()

    def state_dict(self):
        return self.schedule.state_dict()

    def load_state_dict(self, state):
        self.schedule.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_recipes_own_schedule_is_applied_and_recorded(run_loop, tmp_path):
    """With training.schedule "recipe" the loop records and resumes rates without setting them."""
    values = {
        "training": {"schedule": "recipe", "steps": 6},
        "checkpoints": {"every_steps": 3},
        "recipe": {"learning_rate": 0.08},
    }
    run = run_loop(Scheduled, values, tmp_path / "a")
    assert run.records["lr"].tolist() == [0.08, 0.08, 0.04, 0.04, 0.02, 0.02]
    resumed = run_loop(
        Scheduled, values, tmp_path / "b", resume=tmp_path / "a" / "step-00000003.pt"
    )
    assert resumed.records["lr"].tolist() == [0.04, 0.02, 0.02]
    assert_same_bits(resumed.weights(), run.weights())


def test_a_scheduler_that_would_be_overwritten_is_rejected(run_loop):
    """A recipe's scheduler that the loop would overwrite is rejected with the setting to change."""
    with pytest.raises(RecipeError, match="set it to recipe and step the scheduler in after_step"):
        run_loop(Scheduled)


def test_a_rate_set_in_training_step_is_the_one_recorded(run_loop):
    """The recorded rate is the applied one, also if training_step sets it."""

    class Setting(Regression):
        def training_step(self, batch):
            self.optimizers["sgd"].param_groups[0]["lr"] = 0.125
            yield from super().training_step(batch)

    assert run_loop(Setting, {"training": {"steps": 3}}).records["lr"].tolist() == [0.125] * 3


def test_a_frozen_teacher_stays_in_eval_mode(run_loop):
    """Evaluation restores each module's mode, such as a frozen teacher's eval mode."""

    class Teacher(Regression):
        modes: ClassVar = []

        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["teacher"] = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1)).eval()
            for parameter in self.modules["teacher"].parameters():
                parameter.requires_grad_(False)

        def training_step(self, batch):
            self.modes.append((self.modules["teacher"][0].training, self.modules["model"].training))
            yield from super().training_step(batch)

        def evaluate(self):
            assert not self.modules["model"].training
            return {"val/loss": 0.0}

    run_loop(Teacher, {"training": {"steps": 4}, "evaluation": {"every_steps": 1}})
    assert Teacher.modes == [(False, True)] * 4


def test_examples_come_as_they_are_without_shuffle(run_loop):
    """Without shuffling, examples keep their order in each epoch."""
    seen = []

    class Seeing(Regression):
        def batch(self, indices, generator):
            seen.extend(indices.tolist())
            return super().batch(indices, generator)

    run_loop(Seeing, {"training": {"steps": 9, "batch_size": 8, "shuffle": False}})
    assert seen == [*range(64), *range(8)]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 8), (2.5, 20), (0.01, 1), (3.01, 25)])
def test_epochs_stand_in_for_steps(run_loop, epochs, steps):
    """The number of steps follows from the epochs, and an event reports it."""
    run = run_loop(Regression, {"training": {"batch_size": 8, "epochs": epochs}})
    assert run.records["step"].tolist() == list(range(1, steps + 1))
    assert run.of("length") == [{"event": "length", "step": 0, "steps": steps}]


def test_a_schedule_of_epochs_ends_with_them(run_loop):
    """A cosine schedule reaches 0 at the last step of the epochs."""
    values = {"batch_size": 8, "epochs": 2, "schedule": "cosine"}
    assert run_loop(Regression, {"training": values}).records["lr"][-1] == 0


def test_evaluation_can_come_before_the_first_step(run_loop, tmp_path):
    """An untrained model can be evaluated at step 0, which a resumed run does not repeat."""

    class Evaluated(Regression):
        def evaluate(self):
            return {"val/weight": self.modules["model"][0].weight[0, 0].item()}

    values = {
        "training": {"steps": 4},
        "evaluation": {"at_start": True},
        "checkpoints": {"every_steps": 2},
    }
    run = run_loop(Evaluated, values, tmp_path / "a")
    first, last = run.of("metric", name="val/weight")
    assert (first["step"], last["step"]) == (0, 4)
    assert first["value"] != last["value"]
    resumed = run_loop(Evaluated, values, tmp_path / "b", resume=tmp_path / "a/step-00000002.pt")
    assert [event["step"] for event in resumed.of("metric", name="val/weight")] == [4]
