"""Gradient errors that single modules cause, in a precision diff."""

import math

import pytest
import torch
from torch import nn

from halfstep import precision_diff
from halfstep.telemetry.event_codec import fields_of, parse
from halfstep.telemetry.events import PrecisionDiff
from tests.halfstep.precision_lab.cases_made import between
from tests.halfstep.precision_lab.plans_made import cancel


def squared_error(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the squared error of a batch."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_planted_cause_is_the_first(dtype: torch.dtype) -> None:
    """A planted cause has nearly all of the error; shares of operations and memory sum up."""
    torch.manual_seed(0)
    model, batch = between(cancel(300)), torch.randn(16, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = precision_diff(model, batch, squared_error, dtype, causes=20)
    first, *others = report.causes
    assert first.role == "1"
    [alone] = map(float, first.errors.values())
    assert alone == pytest.approx(report.error, rel=0.1)
    errors = [float(error) for each in others for error in each.errors.values()]
    assert max(errors) < alone / 5
    assert errors == sorted(errors, reverse=True)
    for shares in ("operations", "memory"):
        assert math.isclose(sum(getattr(each, shares) for each in report.causes), 1.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = parse(fields_of(report.event))
    assert isinstance(again, PrecisionDiff)
    assert [each.role for each in again.causes] == [each.role for each in report.causes]
    assert "each module causes alone" in report._repr_html_()


def test_causes_are_measured_on_request() -> None:
    """By default no cause is measured, which costs no pass; at most the requested number is."""
    model, batch = between(cancel(300)), torch.randn(16, 32)
    assert precision_diff(model, batch, squared_error).causes == []
    assert len(precision_diff(model, batch, squared_error, causes=1).causes) == 1
    with pytest.raises(ValueError, match="causes = -1: must be a number of modules from 0 to"):
        precision_diff(model, batch, squared_error, causes=-1)


def test_model_in_half_precision_has_no_causes() -> None:
    """Modules in half precision cannot be computed in fp32 individually."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()
    batch = torch.randn(4, 8, dtype=torch.bfloat16)
    assert precision_diff(model, batch, squared_error, torch.bfloat16, causes=5).causes == []
