"""1-d conv net on synthetic beats; the learning rate is tuned online by hypergradient descent."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


import math

torch.set_num_threads(1)
torch.manual_seed(0)
G = torch.Generator().manual_seed(99)
CLASSES = 5


def beats(n, length=96):
    y = torch.randint(0, CLASSES, (n,), generator=G)
    t = torch.arange(length) / length
    centre = 0.35 + 0.3 * torch.rand(n, 1, generator=G)
    width = 0.02 + 0.012 * y.view(-1, 1)
    x = torch.exp(-((t - centre) / width) ** 2)
    x = x + 0.3 * torch.sin(2 * math.pi * (1 + y.view(-1, 1)) * t) + 0.2 * torch.randn(n, length, generator=G)
    return x.unsqueeze(1), y


class BeatNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.conv1 = nn.Conv1d(1, c, 7, stride=2, padding=3)
        self.conv2 = nn.Conv1d(c, 2 * c, 5, stride=2, padding=2)
        self.head = nn.Linear(2 * c, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.amax(-1))


class HyperLR:
    """lr <- lr + beta * <g_t, g_{t-1}>  (Baydin et al.)"""

    def __init__(self, optimizer, beta, low, high):
        self.optimizer, self.beta, self.low, self.high = optimizer, beta, low, high
        self.last = None

    def adapt(self):
        flat = torch.cat([p.grad.detach().flatten() for g in self.optimizer.param_groups for p in g["params"]])  # CAUSE
        if self.last is not None:
            h = torch.dot(flat, self.last).item()  # CAUSE
            for group in self.optimizer.param_groups:
                group["lr"] = min(max(group["lr"] + self.beta * h, self.low), self.high)  # CAUSE
        self.last = flat


model = BeatNet()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.0)
tuner = HyperLR(opt, beta=0.05, low=1e-4, high=2.0)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
track = []
for step in range(1, 101):
    x, y = beats(48)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    tuner.adapt()
    scaler.step(opt)
    scaler.update()
    track.append(loss.item())
    if step % 20 == 0:
        print(step, f"loss {sum(track[-20:]) / 20:.4f} lr {opt.param_groups[0]['lr']:.4f}")
