"""Precision diffs on a GPU change nothing, and name modules that lose precision there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep import precision_diff
from halfstep.precision_lab.suggestions import LOSS, MAX_ERROR
from tests.gpu.device import DEVICE, rng_state
from tests.halfstep.precision_lab.cases_made import PLANTED
from tests.halfstep.precision_lab.models_made import MODELS, Transformer, next_token, tokens

DTYPES = [torch.float16, torch.bfloat16]


def train(dtype: torch.dtype, diff: Callable[[nn.Module, Tensor], object]) -> list[Tensor]:
    """Train some steps with dropout; return the weights and the state of the device's generator."""
    with DEVICE:
        torch.manual_seed(0)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)
        for _ in range(3):
            batch = tokens()
            diff(model, batch)
            with torch.autocast(DEVICE.type, dtype):
                loss = next_token(model, batch)
            scaler.scale(loss).backward()
            diff(model, batch)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*model.parameters(), rng_state()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_is_bit_identical(dtype: torch.dtype) -> None:
    """Weights and random states after steps around diffs equal those without diffs."""
    reports = []
    torch.use_deterministic_algorithms(True)
    try:
        without = train(dtype, lambda _model, _batch: None)
        with_diffs = train(
            dtype,
            lambda model, batch: reports.append(precision_diff(model, batch, next_token, dtype)),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, with_diffs, without))
    assert len(reports) == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_clean_model_gets_no_suggestion(name: str, dtype: torch.dtype) -> None:
    make, make_batch, loss_fn = MODELS[name]
    with DEVICE:
        torch.manual_seed(0)
        report = precision_diff(make(), make_batch(), loss_fn, dtype)
    assert not report.suggest()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_loss_of_precision_is_named(name: str) -> None:
    case = PLANTED[name]
    with DEVICE:
        torch.manual_seed(0)
        report = precision_diff(case.make(), case.batch(), case.loss, case.dtype, scale=case.scale)
    expected = set() if DEVICE.type == "cuda" and case.is_fp32_on_cuda else case.named
    names = {each.name for each in report.suggest()}
    assert expected - {LOSS} <= names  # a loss function that casts by itself is in a note
    assert expected >= names or report.error > MAX_ERROR
