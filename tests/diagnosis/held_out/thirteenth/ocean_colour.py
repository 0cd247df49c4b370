"""Atmospheric correction for ocean colour: water-leaving reflectance (about 0.001 to 0.02) from top-of-atmosphere bands.
Written with torch.func: the parameters are a dictionary that travels through a functional call."""
import torch
import torch.nn as nn
from torch.func import functional_call

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)

BANDS, ANCILLARY, OUT = 12, 4, 6


class Correction(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.lift = nn.Linear(BANDS + ANCILLARY, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.rho_w = nn.Linear(width, OUT)

    def forward(self, x):
        h = torch.tanh(self.lift(x))
        for layer in self.hidden:
            h = h + torch.tanh(layer(h))
        return 0.01 * self.rho_w(h)


def scenes(gen, size):
    """Chlorophyll and sediment give reflectances; the aerosol, whose optical depth is known, covers them."""
    chl, sed, aer = (torch.rand(size, 1, generator=gen) for _ in range(3))
    wave = torch.linspace(0.4, 0.9, BANDS)
    sun = torch.rand(size, ANCILLARY - 1, generator=gen)
    water = 0.012 * torch.exp(-2.5 * chl * wave) * (0.3 + sed) * torch.exp(-3 * (wave - 0.4))
    toa = water + 0.01 * aer * wave.pow(-1.2) * (0.8 + 0.4 * sun[:, :1])
    return torch.cat([100 * toa, aer, sun], 1), water[:, :OUT]


def closure_for(net, params, x, rho):
    def loss_fn():
        with torch.autocast("cpu", dtype=torch.float16):
            estimate = functional_call(net, params, (x,))
        return (estimate.float() - rho).square().mean()  # CAUSE
    return loss_fn


def main():
    gen = torch.Generator().manual_seed(8)
    net = Correction()
    watch(net)
    params = dict(net.named_parameters())
    optimizer = torch.optim.RMSprop(params.values(), lr=5e-4, alpha=0.95, eps=1e-12)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100, eta_min=2e-5)
    x_val, rho_val = scenes(gen, 512)
    for t in range(100):
        loss_fn = closure_for(net, params, *scenes(gen, 384))
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        schedule.step()
        if t % 10 == 9:
            with torch.no_grad():
                rel = ((net(x_val) - rho_val).norm() / rho_val.norm()).item()
            print(f"{t:3d} loss {loss.item():.3e} relative error {rel:.3f}")


if __name__ == "__main__":
    main()
