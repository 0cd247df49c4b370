"""Keyword spotting on log-mel patches, parameters and activations kept in bfloat16."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)

CONFIG = {"classes": 8, "mels": 16, "frames": 20, "width": 48, "base_lr": 3e-3, "final_lr": 3e-5,
          "warmup": 5, "decay_until": 40, "total": 110, "dtype": torch.bfloat16}


class DSBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.depth = nn.Conv1d(ch, ch, 5, padding=2, groups=ch)
        self.point = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        return x + torch.relu(self.point(torch.relu(self.depth(x))))


class SpotNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        w = cfg["width"]
        self.stem = nn.Conv1d(cfg["mels"], w, 3, padding=1)
        self.blocks = nn.Sequential(DSBlock(w), DSBlock(w))
        self.fc = nn.Linear(w, cfg["classes"])

    def forward(self, x):
        return self.fc(self.blocks(torch.relu(self.stem(x))).mean(-1))


class Utterances:
    def __init__(self, cfg, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.cfg = cfg
        self.proto = torch.randn(cfg["classes"], cfg["mels"], 1, generator=self.g)

    def draw(self, n=32):
        y = torch.randint(0, self.cfg["classes"], (n,), generator=self.g)
        noise = torch.randn(n, self.cfg["mels"], self.cfg["frames"], generator=self.g)
        return 0.3 * self.proto[y] + noise, y


def lr_lambda(step, cfg=CONFIG):
    if step < cfg["warmup"]:
        return (step + 1) / cfg["warmup"]
    t = min(1.0, (step - cfg["warmup"]) / (cfg["decay_until"] - cfg["warmup"]))
    low = cfg["final_lr"] / cfg["base_lr"]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * t))


net = SpotNet(CONFIG).to(CONFIG["dtype"])
MODULES = [net]
watch(*MODULES)
optimizer = torch.optim.Adam(net.parameters(), lr=CONFIG["base_lr"])
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
data = Utterances(CONFIG, seed=12)
smoothed = None
for step in range(CONFIG["total"]):
    x, y = data.draw()
    loss = nn.functional.cross_entropy(net(x.to(CONFIG["dtype"])).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # CAUSE
    scheduler.step()
    smoothed = loss.item() if smoothed is None else 0.9 * smoothed + 0.1 * loss.item()
    if step % 10 == 9:
        print(f"step {step + 1} loss {smoothed:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
