"""Signed distance field of a molar scan; a coarse stage in millimetres, then a fine one in metres."""
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)


class SDF(nn.Module):
    def __init__(self, width=64, freqs=3):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(freqs))
        self.inp = nn.Linear(3 + 6 * freqs, width)
        self.hid = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.act = nn.Softplus(beta=20)
        self.dist = nn.Linear(width, 1)

    def forward(self, p):
        angles = (p[..., None] * self.bands).flatten(-2)
        h = self.act(self.inp(torch.cat([p, angles.sin(), angles.cos()], dim=-1)))
        for layer in self.hid:
            h = h + self.act(layer(h))
        return self.dist(h).squeeze(-1)


class MolarScan:
    """Points around a crown with four cusps; distances come in millimetres."""

    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)
        self.cusps = torch.tensor([[0.4, 0.4, 0.5], [-0.4, 0.4, 0.55], [0.4, -0.4, 0.45], [-0.4, -0.4, 0.5]])

    def surface_distance(self, p):
        body = p.norm(dim=-1) - 0.6
        bumps = (p[:, None] - self.cusps).norm(dim=-1).amin(dim=1) - 0.22
        return 5.0 * torch.minimum(body, bumps)

    def sample(self, n, near):
        p = torch.rand(n, 3, generator=self.rng) * 2 - 1
        if near:
            d = self.surface_distance(p)[:, None] / 5.0
            p = p - 0.5 * d * p / p.norm(dim=-1, keepdim=True).clamp(min=0.1)
        return p, self.surface_distance(p)


def coarse(pred, mm):
    return (pred - mm).abs().clamp(max=2.0).mean()


def fine(pred, mm):
    err_m = (pred - mm) * 1e-3
    return err_m.square().mean()  # CAUSE


def fit(net, scan, steps=90, switch=45, points=512):
    for step in range(steps):
        if step in (0, switch):
            stage, lr = (coarse, 2e-3) if step < switch else (fine, 1e-3)
            opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-15)
        p, mm = scan.sample(points, near=step >= switch)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = net(p)
        loss = stage(pred.float(), mm)
        opt.zero_grad(set_to_none=True)
        loss.backward()  # CAUSE
        opt.step()
        if step % 15 == 14:
            rms = (pred.float() - mm).square().mean().sqrt().item()
            print(f"{step:3d} {stage.__name__} loss {loss.item():.3e} rms {rms:.4f} mm")


if __name__ == "__main__":
    net = SDF()
    watch(net)
    fit(net, MolarScan(seed=4))
