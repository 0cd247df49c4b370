"""Total counts under a peak from its sequence's motif scores, by a deep residual network that is trained from scratch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(119)
MOTIFS = 40


class ResidualDense(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dense = nn.Linear(d, d)

    def forward(self, x):
        return x + F.relu(self.dense(x))  # CAUSE


class CountNet(nn.Module):
    def __init__(self, d=64, depth=36):
        super().__init__()
        self.stem = nn.Linear(MOTIFS, d)
        self.blocks = nn.Sequential(*(ResidualDense(d) for _ in range(depth)))
        self.head = nn.Linear(d, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, scores):
        return self.head(self.blocks(F.relu(self.stem(scores)))).squeeze(-1)


class Peaks:
    """Counts of motif hits; a few regions are clusters with many times more."""

    def __init__(self):
        gen = torch.Generator().manual_seed(120)
        self.effect = 0.05 * torch.rand(MOTIFS, generator=gen)

    def batch(self, gen, n=24, clusters=0.01):
        scores = torch.poisson(torch.full((n, MOTIFS), 1.5), generator=gen)
        scores[torch.rand(n, generator=gen) < clusters] *= 12
        log_counts = torch.log1p(scores) @ self.effect
        return scores, log_counts + 0.05 * torch.randn(n, generator=gen)


peaks = Peaks()
model = CountNet()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-5, eps=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
gen = torch.Generator().manual_seed(123)


def train(steps=90):
    for step in range(steps):
        scores, log_counts = peaks.batch(gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(scores)
            loss = F.mse_loss(predicted.float(), log_counts)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f} largest score {scores.max().item():.0f} scale {scaler.get_scale():g}")


train()
