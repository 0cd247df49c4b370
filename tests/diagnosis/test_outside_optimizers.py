"""Parameters with gradients, but without an optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.diagnosis import trial
from tests.diagnosis.parts import autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import HEALTHY, Loop, WatchCall
from tests.marks import extended


@pytest.mark.parametrize("steps", [40, *extended([140])])
@pytest.mark.parametrize(
    ("change", "count"),
    [
        ("replaced head", 2),
        ("added layer", 2),
        ("frozen body", 0),
        ("second optimizer", 0),
        ("copies in fp32", 0),
    ],
)
def test_parameters_without_an_optimizer_are_listed(change: str, count: int, steps: int) -> None:
    """A module made after the optimizer is listed as untrained; one trained by fp32 copies is
    not.
    """

    def train(watch: WatchCall) -> None:
        net: nn.Sequential = mlp()
        copies = copy.deepcopy(net)
        trained = copies if change == "copies in fp32" else net
        if change == "frozen body":
            net[0].requires_grad_(False)
        halves = [net[0], net[2]] if change == "second optimizer" else [trained]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in halves]
        if change == "replaced head":
            net[2] = nn.Linear(32, 4)
        elif change == "added layer":
            net.append(nn.Linear(4, 4))
        scaler = grad_scaler()
        watch(net, name="net")
        for number, (x, y) in enumerate(draw_labelled(steps)):
            net.zero_grad()
            with autocast("fp16"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            for one, other in zip(trained.parameters(), net.parameters(), strict=False):
                one.grad = other.grad
            for optimizer in optimizers[: 2 if number > steps // 2 else 1]:
                scaler.step(optimizer)
            scaler.update()
            if trained is not net:
                net.load_state_dict(copies.state_dict())

    nothing: frozenset[str] = frozenset()
    loop = Loop("net", train, HEALTHY, nothing, nothing, "fp16", 0, 1, "", __file__)
    ended = trial.attempt(loop)
    assert ended.is_same
    # The optimizer has the head that was replaced, as soon as that is certain.
    assert set(ended.causes) <= ({"no_gradient"} if change == "replaced head" else set())
    expected = [f"{count} parameters with gradients are in no optimizer"] if count else []
    assert [each.title for each in ended.findings if not each.cause] == expected
