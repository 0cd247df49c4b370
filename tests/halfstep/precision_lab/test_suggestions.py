"""Suggestions name planted losses of precision, and healthy models get none."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from halfstep import precision_diff, precision_plan
from halfstep.precision_lab.diff import LOSS_UNREPAIRED
from halfstep.precision_lab.suggestions import LOSS, MAX_ERROR, suggestions_of
from tests.halfstep.precision_lab.cases_made import PLANTED
from tests.halfstep.precision_lab.models_made import (
    MODELS,
    USUAL,
    WIDTH,
    Transformer,
    next_token,
    squared_error,
    tokens,
    vectors,
)
from tests.marks import sampled

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.extended)]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_loss_of_precision_is_named(name: str) -> None:
    """The module that loses precision is suggested with evidence, alone unless the gradient stays
    beyond the bounds. A loss function that casts by itself is named in a note, since fp32 does not
    repair it.
    """
    case = PLANTED[name]
    report = precision_diff(case.make(), case.batch(), case.loss, case.dtype, scale=case.scale)
    suggestions = report.suggest()
    names = {each.name for each in suggestions}
    assert case.named - {LOSS} <= names
    assert case.named >= names or report.error > MAX_ERROR
    assert (LOSS_UNREPAIRED in report.event.notes) is (LOSS in case.named)
    assert report.event.suggested == [each.name for each in suggestions]
    assert all(each.evidence and each.error > 0 for each in suggestions)
    assert (report.event.suggested_error is not None) is bool(names)


def fit() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a regression near its optimum, where errors of several layers add up."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    weight, x = torch.randn(32, 8) * 0.2, torch.randn(64, 32)
    batch = (x, x @ weight)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        mean_squares(model, batch).backward()
        optimizer.step()
    return model, batch


def mean_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the loss in fp32."""
    out = model(batch[0])
    with torch.autocast("cpu", enabled=False):
        return functional.mse_loss(out.float(), batch[1])


@pytest.mark.parametrize(("dtype", "short"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_gradient_beyond_the_bounds_gets_the_modules_of_the_plan(
    dtype: torch.dtype, short: str
) -> None:
    """Errors of several modules add up, so the plan's modules are suggested although no local
    error is above the noise.
    """
    model, batch = fit()
    report = precision_diff(model, batch, mean_squares, dtype)
    assert report.error > MAX_ERROR
    plan = precision_plan(model, [batch], mean_squares)
    best = plan.of_precision[short]
    suggestions = report.suggest()
    assert {each.name for each in suggestions} == set(best.named)
    assert float(report.event.suggested_error or 1) == pytest.approx(best.error, rel=0.01)
    assert suggestions.remains == ""
    assert "No module needs fp32" not in str(suggestions)
    assert all("gradient error" in each.evidence[0] for each in suggestions)


def test_what_stays_wrong_is_stated() -> None:
    """The gradient's remaining error is stated, with suggestions and without."""
    model, batch = fit()
    event = precision_diff(model, batch, mean_squares, torch.bfloat16).event
    none = suggestions_of(replace(event, suggested=[], suggested_error=None))
    assert str(none).startswith("The gradient has an error of 1.1")
    some = suggestions_of(replace(event, suggested=["2"], suggested_error=0.5))
    assert str(some).endswith("With these in fp32, the gradient still has an error of 0.5.")
    lost = suggestions_of(replace(event, suggested=["2"], suggested_error=float("inf")))
    assert lost.remains == "With these in fp32, the gradient still is not finite."


def test_loss_function_is_named_if_fp32_repairs_it() -> None:
    """A loss function is named if it overflows under autocast and is finite without."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])[None] * 300
        return torch.bmm(out, out.mT).mean() * 1e-6

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[0].weight.mul_(20)
    report = precision_diff(model, vectors(), loss, torch.float16, scale=1.0)
    assert LOSS in report.event.suggested
    assert float(report.event.suggested_error or 1) < MAX_ERROR


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sampled(MODELS, USUAL))
def test_clean_model_gets_no_suggestion(name: str, dtype: torch.dtype) -> None:
    """A model in which nothing goes wrong needs no fp32, at the scale that a scaler finds."""
    make, make_batch, loss_fn = MODELS[name]
    report = precision_diff(make(), make_batch(), loss_fn, dtype)
    assert not report.suggest()
    assert report.event.suggested == []
    assert report.event.suggested_error is None
    assert str(report.suggest()).startswith("No module needs fp32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_trained_model_gets_no_suggestion(dtype: torch.dtype) -> None:
    """Small gradients at the end of a training are no reason for fp32."""
    model, batch = Transformer(), tokens()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        next_token(model, batch).backward()
        optimizer.step()
    report = precision_diff(model, batch, next_token, dtype)
    assert not report.suggest()


def test_fp32_repairs_an_overflow() -> None:
    """The gradient's error with the suggested module in fp32 is measured and below the bound."""
    case = PLANTED["overflow of a layer"]
    report = precision_diff(case.make(), case.batch(), case.loss, scale=1.0)
    assert report.error == float("inf")
    assert float(report.event.suggested_error or 1) < 1e-3


def test_cast_inside_of_a_module_is_not_repaired_by_fp32() -> None:
    """A module that casts to half precision itself does not improve, and a note says so."""
    case = PLANTED["cancellation"]
    report = precision_diff(case.make(), case.batch(), case.loss)
    assert float(report.event.suggested_error or 0) == pytest.approx(report.error)
    assert any("they cast to half precision themselves" in note for note in report.event.notes)


def test_underflow_is_attributed_to_the_scale() -> None:
    """Gradients that underflow without a loss scale are repaired by one."""
    case = PLANTED["gradients that underflow without a scale"]
    model, batch = case.make(), case.batch()
    without = precision_diff(model, batch, case.loss, scale=1.0)
    assert any("a larger one fixes this" in note for note in without.event.notes)
    assert not precision_diff(model, batch, case.loss).suggest()


def test_noise_of_a_gradient_that_is_zero_is_no_suggestion() -> None:
    """A bias before batch norm, whose gradient is rounding noise in fp32 too, is not suggested."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(), squared_error, torch.bfloat16)
    assert float(report.row("0.bias", "parameter").error) > 1
    assert not report.suggest()
