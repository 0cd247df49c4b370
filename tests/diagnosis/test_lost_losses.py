"""Losses that are not finite: harmless ones, after divergence, and by the loss function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis import trial
from tests.diagnosis.parts import Block, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import HEALTHY, Loop, WatchCall
from tests.marks import extended

LossFunction = Callable[[Tensor, Tensor, int], Tensor]


def _try(precision: str, loss_of: LossFunction, rate: float = 1e-3, **options: Any) -> trial.Trial:
    """Train a small network with SGD, in fp16 with a scaler; return its diagnosis."""

    def train(watch: WatchCall) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        scaler = grad_scaler() if precision == "fp16" else None
        watch(net, name="net")
        for number, (x, y) in enumerate(draw_labelled(60)):
            optimizer.zero_grad()
            with autocast(precision):
                loss = loss_of(net(x), y, number)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return trial.attempt(_loop(train, precision), **options)


def _loop(train: Callable[[WatchCall], object], precision: str) -> Loop:
    nothing: frozenset[str] = frozenset()
    return Loop("net", train, HEALTHY, nothing, nothing, precision, 0, 1, "", __file__)


def _ignoring(out: Tensor, y: Tensor, number: int) -> Tensor:
    return F.cross_entropy(out, torch.full_like(y, -100) if number % 7 == 3 else y)


def _mask(out: Tensor, y: Tensor, number: int) -> Tensor:
    mask = F.one_hot(y, 4).bool() & (torch.arange(len(y)) == number % len(y))[:, None]
    return F.cross_entropy(out.float().masked_fill(mask, -torch.inf), y)


@pytest.mark.parametrize("precision", ["fp16", *extended(["bf16", "fp32"])])
@pytest.mark.parametrize("loss_of", [_ignoring, _mask])
def test_a_loss_without_effect_on_the_weights_is_no_cause(
    precision: str, loss_of: LossFunction
) -> None:
    """A NaN mean over no labels, or an inf of a masked class, is neither overflow nor
    divergence.
    """
    ended = _try(precision, loss_of)
    assert ended.causes == ["undefined_forward"]
    assert [each.title for each in ended.findings] == ["Undefined in every precision"]
    assert ended.watched.nonfinite("weight") == []


def _far(out: Tensor, _y: Tensor, _number: int) -> Tensor:
    return F.mse_loss(out.float(), 30 * torch.ones_like(out))


@pytest.mark.parametrize("is_unreadable", [False, *extended([True])])
@pytest.mark.parametrize(
    ("precision", "rate"), [("fp16", 0.5), ("bf16", 3.0), *extended([("fp32", 3.0)])]
)
def test_divergence_is_named_with_its_losses(
    precision: str, rate: float, *, is_unreadable: bool
) -> None:
    """A loss that grew until it was not finite is divergence, with the learning rate as remedy."""
    first = _try(precision, _far, rate, is_unreadable=is_unreadable).findings[0]
    assert "The loss had grown from" in first.text
    assert "lr=rate / 10" in first.fix
    assert not {"fp32", "bf16"} & {*first.remedies}


def _near_zero(out: Tensor, _y: Tensor, number: int) -> Tensor:
    surrogate = (out.float() - out.float().detach()).mean() + number * 1e-3
    return surrogate / (number < 40)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_loss_that_begins_at_zero_has_not_diverged(precision: str) -> None:
    """A surrogate loss of 0 in the first step and 0.04 later is no divergence."""
    ended = _try(precision, _near_zero)
    assert ended.findings
    assert not any("had grown" in each.text for each in ended.findings)


def _exponential(out: Tensor, _y: Tensor, _number: int) -> Tensor:
    scores = (12 + out.half()).exp()
    return (scores / scores.sum()).log().square().mean()


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_an_overflow_in_the_loss_function_has_its_line(*, is_unreadable: bool) -> None:
    """With finite modules, an overflow in the loss function is named with its line."""
    ended = _try("fp16", _exponential, is_unreadable=is_unreadable)
    assert "`(12 + out.half()).exp()` (test_lost_losses.py:" in ended.findings[0].text


class Attention(nn.Module):
    """Hand-written attention with an additive mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the output. x: (B, T, 8); mask: (B, T, T)."""
        out: Tensor = self.head(self.block(x, mask).mean(1))
        return out


@pytest.mark.parametrize("every", [1, *extended([8])])
def test_nan_of_a_row_that_is_all_masked_is_no_overflow(every: int) -> None:
    """A softmax over an all-masked row, NaN in every precision, is no overflow."""

    def train(watch: WatchCall) -> None:
        net = Attention()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = grad_scaler()
        watch(net, name="net")
        for number in range(60):
            mask = torch.zeros(4, 6, 6)
            if number % every == 0:
                mask[1] = -torch.inf
            optimizer.zero_grad()
            with autocast("fp16"):
                out = net(torch.randn(4, 6, 8), mask)
                loss = F.cross_entropy(out, torch.arange(4))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    first = trial.attempt(_loop(train, "fp16")).findings[0]
    assert (first.cause, first.is_certain) == ("undefined_forward", True)
    assert "block" in first.text
    assert "fp32" not in first.fix
