"""Precision plans: planted needs for precision are found, and healthy models need nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import precision_diff, precision_plan
from halfstep.precision_lab.comparison import UnsupportedModel
from halfstep.precision_lab.plan_event import event_of, plan_from
from tests.halfstep.precision_lab.cases_made import PLANTED, between
from tests.halfstep.precision_lab.models_made import (
    MODELS,
    USUAL,
    WIDTH,
    chain,
    squared_error,
    vectors,
)
from tests.halfstep.precision_lab.plans_made import PLANS, STRICT, cancel
from tests.halfstep.precision_lab.test_preservation import STEPS, flat, train
from tests.marks import extended, looped, sampled

pytestmark = pytest.mark.slow

FURTHER = ("overflow of a layer", "weights that underflow", "every block", "one block of four")


class Shift(nn.Module):
    """A matrix product whose result loses some precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + 60) - 60


class Shifts(nn.Module):
    """Equal modules followed by one layer that is larger than all of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(Shift() for _ in range(count))
        self.last = nn.Sequential(nn.Linear(WIDTH, 1024 * WIDTH), nn.Linear(1024 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            x = shift(x)
        y: Tensor = self.last(x)
        return y


def is_dominated(plan: Any, point: Any) -> bool:
    """Return whether another point is as good by every measure."""
    return any(
        other is not point
        and other.time <= point.time
        and other.error <= point.error
        and len(other.named) <= len(point.named)
        for other in plan.points
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extended) if name in FURTHER else name for name in PLANS],
)
def test_planted_need_is_named(name: str) -> None:
    """A plan names exactly the module that needs more precision, and keeps its error bound."""
    case = PLANS[name]
    plan = precision_plan(case.make(), [case.batch(), case.batch()], case.loss, **STRICT)
    fp16, bf16 = plan.of_precision["fp16"], plan.of_precision["bf16"]
    assert set(fp16.named) == case.fp16
    assert fp16.error <= plan.max_error
    if case.bf16 is not None:
        assert set(bf16.named) == case.bf16
    # The module is also the one that causes most of the error.
    assert plan.modules[0].errors["fp16"] > plan.max_error
    assert any(each in plan.modules[0].names for each in case.fp16) or "*" in str(case.fp16)
    assert not any(is_dominated(plan, point) for point in plan.points)
    assert plan.best in plan.points
    assert plan.best.is_within


@pytest.mark.parametrize(
    "name",
    sampled(MODELS, {*USUAL} - {"checkpointed"}),
)
def test_clean_model_is_in_fp16_everywhere(name: str) -> None:
    """A model that needs no more precision gets fp16 without exceptions."""
    make, make_batch, loss_fn = MODELS[name]
    plan = precision_plan(make(), [make_batch()], loss_fn)
    assert str(plan.best) == "fp16 everywhere"
    assert plan.of_precision["bf16"].named == []
    assert plan.best.config == {
        "precision": "fp16",
        "scaler": {"init_scale": plan.best.init_scale},
    }


def test_short_mantissa_is_named() -> None:
    """The plan says that only bf16's mantissa is too short for the model."""
    plan = precision_plan(between(cancel(12)), [vectors()], squared_error, **STRICT)
    assert str(plan.best) == "fp16 everywhere"
    assert plan.of_precision["bf16"].fp32 == ["1"]
    assert "Only bf16 exceeds the bounds, with 8 bits of precision" in str(plan)


def test_small_range_is_named() -> None:
    """The plan says that only fp16's range is too small for the model, and prefers bf16."""
    case = PLANS["overflow of a layer"]
    plan = precision_plan(case.make(), [case.batch()], case.loss)
    assert str(plan.best) == "bf16 everywhere"
    assert "Only fp16 exceeds the bounds, because of its range" in str(plan)


def test_two_needs_are_both_named() -> None:
    """Two modules that each exceed the bound are both moved, by one entry each."""
    model = nn.Sequential(*between(cancel(1500)), *between(cancel(1500)), nn.Linear(WIDTH, WIDTH))
    plan = precision_plan(model, [vectors()], squared_error)
    assert plan.of_precision["fp16"].fp32 == ["1", "4"]


def test_bound_decides() -> None:
    """A wider bound needs fewer modules in fp32, and a tighter one more."""
    model = nn.Sequential(*between(cancel(300)), *between(cancel(30)))
    plans = [
        precision_plan(model, [vectors()], squared_error, max_error=error, min_cosine=0.9)
        for error in (0.5, 0.03, 0.003)
    ]
    assert [plan.of_precision["fp16"].named for plan in plans] == [[], ["1"], ["1", "4"]]


@pytest.mark.parametrize("count", [40, pytest.param(64, marks=pytest.mark.extended)])
def test_mixes_without_a_pattern_are_left_out(count: int) -> None:
    """A mix that would need many patterns, such as all but one of equal modules, is left out."""
    plan = precision_plan(Shifts(count), [vectors(4)], squared_error)
    assert plan.of_precision["bf16"].fp32 == ["shifts.*"]
    assert plan_from(event_of(plan)) == plan


@pytest.mark.parametrize("name", ["cancellation", "loss in fp16"])
def test_own_cast_is_attributed(name: str) -> None:
    """A cast in the model's code, which no mix avoids, is attributed to the diff's module."""
    case = PLANTED[name]
    plan = precision_plan(case.make(), [case.batch()], case.loss, **STRICT)
    [named] = case.named
    assert not plan.best.is_within
    assert str(plan).startswith("No mix is within the bounds")
    assert f"a precision diff names {named}" in str(plan)
    json.dumps(plan.as_dict(), allow_nan=False)


def test_underflow_is_repaired_by_a_larger_scale() -> None:
    """Gradients that underflow at the given loss scale need a larger one, not fp32."""

    def tiny(model: nn.Module, batch: Any) -> Tensor:
        return 1e-6 * squared_error(model, batch)

    plan = precision_plan(chain(), [vectors()], tiny, scale=1.0)
    assert str(plan.best) == "fp16 everywhere"
    assert plan.best.init_scale is not None
    assert plan.best.init_scale > 1


def test_costs_follow_from_operations() -> None:
    """Without a GPU a plan's times follow from counted operations."""
    case = PLANS["exp of large scores"]
    plan = precision_plan(case.make(), [case.batch()], case.loss, fp32_cost=10, **STRICT)
    assert (plan.cost, plan.device, plan.fp32_cost) == ("operations", "cpu", 10)
    shares = {row.role: row.operations for row in plan.modules}
    assert shares == pytest.approx({"0": 0.5, "1": 0, "1.score": 0.5, "(loss)": 0})
    assert sum(row.memory for row in plan.modules) == pytest.approx(1)
    assert plan.best.fp32 == ["1"]  # with the projection in it
    assert plan.best.time == pytest.approx((0.5 + 10 * 0.5) / 10)
    assert (plan.points[0].time, plan.points[-1].time) == (0.1, 1)


def test_plan_is_plain_values() -> None:
    """A plan as JSON has each point's configuration; a notebook shows it as tables."""
    case = PLANS["cancellation"]
    plan = precision_plan(case.make(), [case.batch(), case.batch()], case.loss, **STRICT)
    values = json.loads(json.dumps(plan.as_dict()))
    best = values["points"][values["best"]]
    assert best["config"] == {
        "precision": "fp16",
        "modules": {"fp32": ["1"]},
        "scaler": {"init_scale": 65536},
    }
    assert values["batch_deviation"] > 0.1
    assert "<td>module 1 in fp32</td>" in plan._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "counting",
        *extended(["convolutions", "checkpointed", "spectral", "trees"]),
    ],
)
def test_training_is_bit_identical(name: str) -> None:
    """Steps around plans, at every point of the loop, are bit-identical to steps without them."""
    make, make_batch, loss_fn = MODELS[name]
    without = train(make, make_batch, loss_fn, torch.bfloat16, lambda _m, _b: None)
    plans = []
    with_plans = train(
        make,
        make_batch,
        loss_fn,
        torch.bfloat16,
        lambda model, batch: plans.append(precision_plan(model, [batch], loss_fn)),
    )
    assert flat(with_plans) == flat(without)
    assert len(plans) == 4 * STEPS


def test_drawing_the_batches_leaves_the_generators() -> None:
    """Drawing batches at random leaves the generators as they were, also after an error."""

    def drawn() -> Iterator[Any]:
        for _ in range(3):
            yield vectors()

    model, state = chain(), torch.get_rng_state()
    assert precision_plan(model, drawn(), squared_error).batches == 3
    assert torch.equal(torch.get_rng_state(), state)

    def torn() -> Iterator[Any]:
        yield vectors()
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        precision_plan(model, torn(), squared_error)
    assert torch.equal(torch.get_rng_state(), state)


@looped(
    "count, settings, message",
    [
        (0, {}, "batches has no batch: pass 1 to 16"),
        (17, {}, "batches has more than 16 batches: pass 1 to 16"),
        (1, {"max_error": -1}, "max_error = -1: must be a number from 0 to 10"),
        (1, {"min_cosine": float("nan")}, "min_cosine = nan: must be a number from -1 to 1"),
        (1, {"fp32_cost": 0.5}, "fp32_cost = 0.5: must be a number from 1 to 1,000"),
        (1, {"scale": "much"}, "scale = 'much': must be a number from 1 to"),
    ],
)
def test_wrong_arguments_are_named(count: int, settings: dict[str, Any], message: str) -> None:
    """A rejected argument is named with its value and the allowed ones."""
    batches = [vectors()] * count
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        precision_plan(chain(), batches, squared_error, **settings)


def test_half_weights_are_rejected() -> None:
    """A model with half-precision weights is rejected: it has no fp32 reference for a plan."""
    with pytest.raises(UnsupportedModel, match=r"weights of type torch\.bfloat16"):
        precision_plan(chain().bfloat16(), [vectors()], squared_error)


def test_code_that_does_not_allow_a_precision_is_noted() -> None:
    """A precision in which the model raises is left out of the plan, with the reason."""
    case = PLANTED["running sum"]
    plan = precision_plan(case.make(), [case.batch()], case.loss)
    assert list(plan.of_precision) == ["fp16"]
    assert any(note.startswith("bf16 is not possible: ") for note in plan.notes)


def test_measured_error_is_that_of_a_diff() -> None:
    """A plan without modules of other precisions has the error of a precision diff."""
    make, make_batch, loss_fn = MODELS["transformer"]
    model, batch = make(), make_batch()
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        point = precision_plan(model, [batch], loss_fn).of_precision[precision]
        report = precision_diff(model, batch, loss_fn, dtype)
        assert (point.error, point.cosine) == (report.error, report.cosine)


def test_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """The documentation's example prints the documented output, except for digits."""
    guide = Path("docs/how-to/precision-lab.md").read_text().partition("## Precision plan")[2]
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", guide, re.DOTALL)[:2]
    names: dict[str, Any] = {}
    exec(code, names)
    digits = re.compile(r"[\d.]*\d")
    assert digits.sub("#", capsys.readouterr().out) == digits.sub("#", shown)
    assert names["plan"].best.config == {"precision": "bf16"}
    assert names["plan"].of_precision["fp16"].bf16 == ["5"]
    first, second, *_ = [row.errors["fp16"] for row in names["plan"].modules]
    assert (first, second) == pytest.approx((1.0, 0.007), rel=0.2)
