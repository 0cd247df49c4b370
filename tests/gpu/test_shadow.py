"""Steps with shadows on a GPU, whose backward pass has its own thread."""

import torch
from torch import Tensor, nn

from halfstep.check.session import CheckedLoop, CheckedSteps
from tests.gpu.device import DEVICE, rng_state


def _train(factor: float) -> list[Tensor]:
    """Train with dropout; return the weights and the generator's state."""
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
    """A check of a healthy loop changes no bit and has no finding."""
    bare = _train(1.0)
    with CheckedLoop(CheckedSteps(steps=0)) as check:
        checked = _train(1.0)
    assert all(map(torch.equal, bare, checked))
    assert check.steps == 6
    assert not check.get_unexamined().errors
    assert not [each for each in check.found() if each.is_fault]


def test_an_overflow_has_its_line() -> None:
    """A product beyond fp16 that is finite in fp32 has its line."""
    with CheckedLoop(CheckedSteps(steps=0)) as check:
        _train(1e6)
    first = check.found()[0].first
    assert (first.kind, first.site.source) == ("overflow", "net(x) * factor")
    assert first.value is not None
    assert first.value > 65504


def test_the_backward_pass_is_observed() -> None:
    """Gradients that are 0 in fp16 without a scaler, and not in fp32, are reported."""
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
