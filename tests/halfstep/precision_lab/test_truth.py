"""Errors compared with a plain script that runs a batch twice, and their parts with analysis."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import precision_diff
from halfstep.precision_lab.suggestions import ROUNDING_UNIT
from tests.halfstep.precision_lab.models_made import (
    MODELS,
    WIDTH,
    Loss,
    chain,
    squared_error,
    vectors,
)
from tests.marks import extended

#: Without in-place operations, which full backward hooks do not allow.
PLAIN = ("chain", "transformer", "checkpointed", "recurrent", "gru", "multihead")
Numbers = dict[tuple[str, int, str], list[Tensor]]


def run_plainly(
    model: nn.Module, batch: Any, loss_fn: Loss, dtype: torch.dtype | None, scale: float
) -> Numbers:
    """Return outputs, input gradients and parameter gradients, as a user's script would."""
    numbers: Numbers = {}
    counts: dict[tuple[str, str], int] = {}
    handles = []

    def note(name: str, direction: str, values: Any) -> None:
        values = values if isinstance(values, tuple) else (values,)
        number = counts[name, direction] = counts.get((name, direction), 0) + 1
        factor = scale if direction == "backward" else 1
        tensors = [v.detach().double() / factor for v in values if isinstance(v, Tensor)]
        numbers[name, number, direction] = tensors

    for name, module in model.named_modules():
        name = name or type(model).__name__
        handles += [
            module.register_forward_hook(
                lambda _m, _i, output, name=name: note(name, "forward", output)
            ),
            module.register_full_backward_hook(
                lambda _m, inputs, _o, name=name: note(name, "backward", inputs)
            ),
        ]
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = loss_fn(model, batch)
    gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        numbers[name, 0, "parameter"] = [gradient.double() / scale]
    for handle in handles:
        handle.remove()
    return numbers


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float16, 1024.0),
        pytest.param(torch.bfloat16, 1.0, marks=pytest.mark.extended),
    ],
)
def test_errors_agree_with_a_plain_double_run(name: str, dtype: torch.dtype, scale: float) -> None:
    """Every error is that of a script which runs the batch in both precisions, to 1e-6."""
    make, make_batch, loss_fn = MODELS[name]
    model, batch = make(), make_batch()
    if name == "checkpointed":  # its hooks would count the repeated forward passes
        torch.manual_seed(0)
        plain_model = MODELS["transformer"][0]()
    else:
        plain_model = model
    low = run_plainly(plain_model, batch, loss_fn, dtype, scale)
    reference = run_plainly(plain_model, batch, loss_fn, None, 1.0)
    torch.manual_seed(5)
    report = precision_diff(model, batch, loss_fn, dtype, scale=scale)
    compared = 0
    for row in report.rows:
        key = row.name, row.call, row.direction
        if row.direction == "backward":  # hooks see the calls in reverse order
            calls = max(r.call for r in report.rows if r.name == row.name)
            key = row.name, calls + 1 - row.call, row.direction
        if key not in reference or not reference[key]:
            continue
        # Full backward hooks return zeros for inputs without a gradient.
        used = [index for index, tensor in enumerate(reference[key]) if tensor.any()]
        own, right = (
            torch.cat([each[key][index].flatten() for index in used]) for each in (low, reference)
        )
        difference = own - right
        rms = right.norm() / math.sqrt(right.numel())
        assert row.error == pytest.approx(float(difference.norm() / right.norm()), rel=1e-6), key
        assert row.largest == pytest.approx(float(difference.abs().max() / rms), rel=1e-5), key
        cosine = float(own @ right / (own.norm() * right.norm()))
        assert row.cosine == pytest.approx(cosine, abs=1e-9), key
        assert row.flushed == float(((own == 0) & (right != 0)).double().mean()), key
        compared += 1
    parameters = len(list(model.parameters()))
    assert compared >= parameters + 2


@pytest.mark.parametrize("dtype", [torch.float16, *extended([torch.bfloat16])])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_parts_explain_the_total_of_linear_chains(dtype: torch.dtype, depth: int) -> None:
    """Local error and inherited error, the input's error times the weights, sum up to the total."""
    model, batch = chain(depth), vectors()
    outputs: dict[str, list[Tensor]] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda _m, inputs, output, name=name: outputs.setdefault(name, []).append(
                torch.stack([inputs[0].float(), output.float()]).detach()
            )
        )
    report = precision_diff(model, batch, squared_error, dtype, scale=1.0)
    unit = ROUNDING_UNIT[str(dtype).removeprefix("torch.")]
    for name, module in model.named_children():
        assert isinstance(module, nn.Linear)
        row = report.row(name)
        # Called in the reference, in low precision, and in the local run.
        (x_reference, y_reference), (x_low, y_low), (_, y_local) = outputs[name]
        norm = float(y_reference.norm())
        assert row.local == pytest.approx(float((y_local - y_reference).norm()) / norm, rel=1e-5)
        assert row.inherited == pytest.approx(float((y_low - y_local).norm()) / norm, rel=1e-5)
        analytic = float(((x_low - x_reference) @ module.weight.detach().T).norm()) / norm
        assert row.inherited == pytest.approx(analytic, abs=2 * unit)
        # Independent errors add in squares.
        together = math.hypot(float(row.local or 0), float(row.inherited or 0))
        assert row.error == pytest.approx(together, rel=0.25)
    assert report.row("0").inherited == 0
    assert report.row(str(depth - 1), "backward" if depth > 1 else "forward").local != 0


def test_error_of_a_planted_value_is_exact() -> None:
    """A weight that fp16 rounds by a known amount gives exactly this local error."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1 + 2.0**-11)  # rounds to 1
        model[1].weight.fill_(1)
    report = precision_diff(model, vectors(1, 1, 1), lambda m, b: m(b[0] * 0 + 1).sum(), scale=1.0)
    expected = 2.0**-11 / (1 + 2.0**-11)
    first, second = report.row("0"), report.row("1")
    assert (first.local, first.inherited) == (pytest.approx(expected), 0)
    assert (second.local, second.inherited) == (pytest.approx(expected), 0)  # its own rounding
    assert second.error == pytest.approx(expected)


def test_reference_in_double_precision() -> None:
    """A float64 reference measures fp32's own error as well, and leaves the weights alone."""
    model, batch = chain(2), vectors()
    weights = list(model.parameters())
    report = precision_diff(model, batch, squared_error, torch.bfloat16, reference=torch.float64)
    assert report.event.reference == "float64"
    assert 1e-3 < report.error < 1e-2
    assert all(
        p is q and p.dtype == torch.float32
        for p, q in zip(model.parameters(), weights, strict=True)
    )
    assert model(batch[0]).shape == (16, WIDTH)
