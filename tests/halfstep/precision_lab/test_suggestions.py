"""Suggestions: planted losses of precision are named, and clean models get none."""

import pytest
import torch
from torch import nn

from halfstep import precision_diff
from tests.halfstep.precision_lab.cases_made import PLANTED
from tests.halfstep.precision_lab.models_made import (
    MODELS,
    WIDTH,
    Transformer,
    next_token,
    squared,
    tokens,
    vectors,
)

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.extended)]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_loss_of_precision_is_named(name: str) -> None:
    """Exactly the module that loses precision is suggested, with evidence."""
    case = PLANTED[name]
    report = precision_diff(case.make(), case.batch(), case.loss, case.dtype, scale=case.scale)
    suggestions = report.suggest()
    assert {each.name for each in suggestions} == case.named
    assert report.event.suggested == [each.name for each in suggestions]
    assert all(each.evidence and each.error > 0 for each in suggestions)
    assert report.event.suggested_error is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
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
    """The whole gradient's error with the suggested module in fp32 is measured."""
    case = PLANTED["overflow of a layer"]
    report = precision_diff(case.make(), case.batch(), case.loss, scale=1.0)
    assert report.error == float("inf")
    assert float(report.event.suggested_error or 1) < 1e-3


def test_cast_inside_of_a_module_is_not_repaired_by_fp32() -> None:
    """A module that casts to half precision itself stays as bad, and a note says so."""
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
    """A bias before batch norm has no gradient but rounding errors, which fp32 keeps too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(), squared, torch.bfloat16)
    assert float(report.row("0.bias", "parameter").error) > 1
    assert not report.suggest()
