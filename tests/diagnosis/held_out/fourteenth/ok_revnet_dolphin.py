"""Dolphin click detection with reversible blocks: activations are rebuilt in the backward pass."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(34)
sea = torch.Generator().manual_seed(43)


class Couple(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x1, x2, f, g, *weights):
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.fg, ctx.weights = (f, g), weights
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, d1, d2):
        f, g = ctx.fg
        y1, y2 = ctx.saved_tensors
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy = g(y1)
            x2 = (y2 - gy).detach().requires_grad_()
            fx = f(x2)
        wf, wg = ctx.weights[: len(ctx.weights) // 2], ctx.weights[len(ctx.weights) // 2:]
        through_g = torch.autograd.grad(gy, (y1, *wg), d2.to(gy.dtype))
        d1 = d1 + through_g[0]
        through_f = torch.autograd.grad(fx, (x2, *wf), d1.to(fx.dtype))
        return (d1, d2 + through_f[0], None, None, *through_f[1:], *through_g[1:])


def branch(c):
    return nn.Sequential(nn.Conv1d(c, c, 7, padding=3), nn.GELU(), nn.Conv1d(c, c, 1))


class Rev(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f, self.g = branch(c), branch(c)

    def forward(self, pair):
        return Couple.apply(*pair, self.f, self.g, *self.f.parameters(), *self.g.parameters())


class ClickNet(nn.Module):
    def __init__(self, c=12, depth=2):
        super().__init__()
        self.stem = nn.Conv1d(1, 2 * c, 9, stride=2, padding=4)
        self.rev = nn.Sequential(*[Rev(c) for _ in range(depth)])
        self.head = nn.Linear(2 * c, 1)

    def forward(self, wave):
        x = self.stem(wave).float()
        pair = self.rev(tuple(x.chunk(2, dim=1)))
        return self.head(torch.cat(pair, dim=1).amax(-1)).squeeze(-1)


def hydrophone(n, length=64):
    t = torch.arange(length)
    here = torch.rand(n, generator=sea) < 0.5
    when = 15 + 34 * torch.rand(n, 1, generator=sea)
    click = torch.exp(-((t - when) / 4).square()) * torch.cos(1.3 * (t - when))
    shrimp = (torch.rand(n, length, generator=sea) < 0.02) * torch.randn(n, length, generator=sea) * 2
    wave = 1.2 * click * here[:, None] + shrimp + 0.25 * torch.randn(n, length, generator=sea)
    return wave.unsqueeze(1), here.float()


net = ClickNet()
watch(net)
averaged = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=25)

for step in range(70):
    wave, here = hydrophone(24)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logit = net(wave)
        loss = F.binary_cross_entropy_with_logits(logit, here)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        torch._foreach_lerp_(list(averaged.parameters()), list(net.parameters()), 0.05)
    if step % 10 == 9:
        right = ((logit > 0) == (here > 0.5)).float().mean().item()
        print(f"{step:2d} loss {loss.item():.4f} right {right:.2f} scale {scaler.get_scale():g}")
