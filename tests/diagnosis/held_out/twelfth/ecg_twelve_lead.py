"""Arrhythmia classification of multi-lead ECG records, 1-d residual CNN, bf16."""
import numpy as np
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
LEADS, SAMPLES = 6, 128


class Records:
    """Raw millivolt traces; written by three kinds of recorders."""

    def __init__(self, n=160, seed=41):
        rng = np.random.default_rng(seed)
        self.rate = rng.integers(0, 3, n)
        self.traces = np.zeros((n, LEADS, SAMPLES), np.float32)
        time = np.arange(SAMPLES) / 64.0
        for i in range(n):
            beats = 1.0 + 0.8 * self.rate[i]
            phase = rng.uniform(0, 1)
            pulse = np.exp(-(((time * beats + phase) % 1.0 - 0.5) ** 2) / 0.004)
            gain = rng.uniform(0.4, 1.4, (LEADS, 1))
            self.traces[i] = gain * pulse + 0.03 * rng.standard_normal((LEADS, SAMPLES))
        self.traces[117, 4] = 0.0
        self.order = rng.permutation(n)
        where = int(np.flatnonzero(self.order == 117)[0])
        self.order[[where, 133]] = self.order[[133, where]]

    @staticmethod
    def standardise(trace):
        mean = trace.mean(-1, keepdims=True)
        with np.errstate(all="ignore"):
            return (trace - mean) / trace.std(-1, keepdims=True)  # CAUSE

    def batches(self, size):
        for lo in range(0, len(self.order), size):
            idx = self.order[lo:lo + size]
            x = np.stack([self.standardise(self.traces[i]) for i in idx])
            yield torch.from_numpy(x.astype(np.float32)), torch.from_numpy(self.rate[idx])


class ResBlock(nn.Module):
    def __init__(self, c, stride):
        super().__init__()
        self.a = nn.Conv1d(c, c, 7, stride=stride, padding=3)
        self.b = nn.Conv1d(c, c, 7, padding=3)
        self.na, self.nb = nn.GroupNorm(4, c), nn.GroupNorm(4, c)
        self.skip = nn.AvgPool1d(stride)

    def forward(self, x):
        y = torch.relu(self.na(self.a(x)))
        return torch.relu(self.skip(x) + self.nb(self.b(y)))


def build(width=32):
    return nn.Sequential(
        nn.Conv1d(LEADS, width, 15, padding=7), nn.ReLU(), ResBlock(width, 4), ResBlock(width, 4),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 3))


net = build()
MODULES = [net]
watch(*MODULES)
optim = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.5)
records = Records()
step = 0
for epoch in range(3):
    seen = hits = 0
    for x, y in records.batches(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        hits += (logits.argmax(1) == y).sum().item()
        seen += len(y)
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
    print(f"epoch {epoch} accuracy {hits / seen:.3f}")
