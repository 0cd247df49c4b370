"""Bearing fault detection from vibration; batches with a broken sensor are left out by their gradient norm."""
from collections import deque
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)


class FaultNet(nn.Module):
    def __init__(self, c=16, classes=4):
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv1d(1, c, 9, 4, 4), nn.GroupNorm(4, c), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv1d(c, 2 * c, 5, 4, 2), nn.GroupNorm(4, 2 * c), nn.ReLU())
        self.head = nn.Linear(2 * c, classes)
        self.energy = nn.Linear(2 * c, 1)

    def forward(self, x):
        h = checkpoint(self.stage1, x, use_reentrant=False)
        h = checkpoint(self.stage2, h, use_reentrant=False).mean(-1)
        return self.head(h), self.energy(h).squeeze(-1)


def recording(n, generator, broken):
    label = torch.randint(0, 4, (n,), generator=generator)
    t = torch.arange(256) / 256
    impact = torch.sin(6.28 * 40 * t) * torch.exp(-20 * ((t[None] * (2 + 2 * label[:, None])) % 1))
    x = impact + 0.2 * torch.randn(n, 256, generator=generator)
    energy = impact.square().mean(-1) * 4
    if broken:
        energy = energy + 60 * torch.rand(n, generator=generator)
    return x[:, None], label, energy


class NormGate:
    def __init__(self, factor=4.0, memory=15):
        self.factor, self.norms, self.left_out = factor, deque(maxlen=memory), []

    def accepts(self, norm, step):
        usual = median(self.norms) if len(self.norms) >= 5 else float("inf")
        if norm < self.factor * usual:
            self.norms.append(norm)
            return True
        self.left_out.append(step)
        return False


def run(steps=90):
    model, gate = FaultNet(), NormGate()
    watch(model)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1.2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=25)
    generator = torch.Generator().manual_seed(62)
    for step in range(steps):
        x, label, energy = recording(24, generator, broken=step in (31, 32, 58, 77))
        with torch.autocast("cpu", dtype=torch.float16):
            logits, level = model(x)
        loss = F.cross_entropy(logits.float(), label) + F.mse_loss(level.float(), energy)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        if gate.accepts(norm, step):
            scaler.step(optimizer)
            averaged.update_parameters(model)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            print(f"{step + 1} loss {loss.item():.3f} norm {norm:.3f} left out {gate.left_out} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    run()
