"""Two-stem mask estimation; gradients are clipped by the z-score of their norm (ZClip)."""
import numpy as np
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2)
rng = np.random.default_rng(4)

FREQ, FRAMES = 48, 20


def mixture(batch=8):
    t = np.arange(FRAMES)
    f = np.arange(FREQ)
    bass, lead = [], []
    for _ in range(batch):
        pitch = rng.uniform(3, 12) + 1.5 * np.sin(t / rng.uniform(2, 6))
        bass.append(np.exp(-0.5 * ((f[None] - pitch[:, None]) / 1.5) ** 2) * rng.uniform(2, 10))
        pitch = rng.uniform(18, 40) + 3.0 * np.sin(t / rng.uniform(1, 4))
        lead.append(np.exp(-0.5 * ((f[None] - pitch[:, None]) / 2.0) ** 2) * rng.uniform(2, 10))
    stems = np.stack([np.stack(bass), np.stack(lead)], 1) + 0.05 * rng.random((batch, 2, FRAMES, FREQ))
    return torch.from_numpy(stems).float()


class GatedConv(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.conv = nn.Conv1d(cin, 2 * cout, 3, padding=dilation, dilation=dilation)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, 1)
        return a * torch.sigmoid(b)


class Separator(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.inp = nn.Conv1d(FREQ, width, 1)
        self.stack = nn.ModuleList(GatedConv(width, width, d) for d in (1, 2, 4))
        self.mask = nn.Conv1d(width, 2 * FREQ, 1)

    def forward(self, mix):
        h = self.inp(torch.log1p(mix).transpose(1, 2))
        for layer in self.stack:
            h = h + layer(h)
        m = torch.sigmoid(self.mask(h)).view(-1, 2, FREQ, mix.size(1)).transpose(2, 3)
        return m * mix[:, None]


class ZClip:
    """Clips to mean + z standard deviations of the recent gradient norms (exponential averages)."""

    def __init__(self, z=2.0, alpha=0.9):
        self.z, self.alpha, self.mean, self.var = z, alpha, None, 0.0

    def __call__(self, params):
        params = [p for p in params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params])).item()
        if self.mean is None:
            self.mean, self.var = norm, (0.25 * norm) ** 2
        threshold = self.mean + self.z * self.var ** 0.5
        nn.utils.clip_grad_norm_(params, threshold)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * norm  # CAUSE
        self.var = self.alpha * self.var + (1 - self.alpha) * (norm - self.mean) ** 2  # CAUSE
        return threshold


class Trainer:
    def __init__(self):
        self.net = Separator()
        watch(self.net)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=12)
        self.zclip = ZClip()

    def training_step(self):
        stems = mixture()
        with torch.autocast("cpu", dtype=torch.float16):
            estimate = self.net(stems.sum(1))
        loss = (estimate.float() - stems).square().sum((1, 2, 3)).mean() / FRAMES
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        threshold = self.zclip(self.net.parameters())
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), threshold


if __name__ == "__main__":
    trainer = Trainer()
    for step in range(90):
        loss, threshold = trainer.training_step()
        if step % 5 == 0:
            print(f"{step:3d} loss {loss:.4f} clip {threshold:.4f} scale {trainer.scaler.get_scale():g}")
