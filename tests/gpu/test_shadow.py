"""Steps that run with their shadows on a GPU, whose backward pass has a thread of its own."""

import torch
from torch import Tensor, nn

from halfstep.check.session import CheckedLoop, CheckedSteps
from tests.gpu.device import DEVICE, rng_state


def _train(factor: float) -> list[Tensor]:
    """Train with a dropout, and return the weights and the generator's state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    x, y = torch.randn(32, 64, device=DEVICE), torch.randn(32, 8, device=DEVICE)
    for _ in range(6):
        with torch.autocast(DEVICE.type, torch.float16):
            loss = nn.functional.mse_loss(net(x) * factor, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*(p.detach().clone() for p in net.parameters()), rng_state()]


def test_a_checked_loop_is_equal_to_the_bit() -> None:
    """A healthy loop has no finding."""
    bare = _train(1.0)
    with CheckedLoop(CheckedSteps(steps=0)) as check:
        checked = _train(1.0)
    assert all(map(torch.equal, bare, checked))
    assert check.steps == 6
    assert not check.get_unexamined().errors
    assert not [each for each in check.found() if each.is_fault]


def test_an_overflow_has_its_line() -> None:
    """The product is beyond fp16, and finite in fp32."""
    with CheckedLoop(CheckedSteps(steps=0)) as check:
        _train(1e6)
    first = check.found()[0].first
    assert (first.kind, first.site.source) == ("overflow", "net(x) * factor")
    assert first.value is not None
    assert first.value > 65504


def test_the_backward_pass_is_observed() -> None:
    """Gradients that are too small for fp16 without a scaler are 0 there only."""
    net = nn.Linear(64, 8).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device=DEVICE)
    with CheckedLoop(CheckedSteps(steps=0)) as check:
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.float16):
                out = net(x)
            (out.float().mean() * 1e-7).backward()
            optimizer.step()
    assert [each.first.kind for each in check.found() if each.is_fault] == ["gradients_underflow"]
