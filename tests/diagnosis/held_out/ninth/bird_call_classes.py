import math
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(2024)
torch.set_num_threads(1)

SPECIES = ["wren", "robin", "blackcap", "chiffchaff", "nuthatch", "hoopoe"]


def read_recordings(seed):
    """Two field seasons of log-mel clips. The second one has a visitor from the south."""
    g = torch.Generator().manual_seed(seed)
    season1 = torch.multinomial(torch.tensor([6.0, 5, 3, 2, 1, 0]), 500, replacement=True, generator=g)
    season2 = torch.multinomial(torch.tensor([6.0, 5, 3, 2, 1, 0.18]), 420, replacement=True, generator=g)
    y = torch.cat([season1, season2])
    t = torch.linspace(0, 1, 24)
    f = torch.linspace(0, 1, 16)[:, None]
    ridge = torch.stack([0.5 + 0.3 * torch.sin(math.tau * (k + 1) * t * 0.5 + k) for k in range(len(SPECIES))])
    x = torch.exp(-((f - ridge[y][:, None, :]) ** 2) / 0.02) + 0.4 * torch.randn(len(y), 16, 24, generator=g)
    return x[:, None], y, len(season1)


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 5, padding=2)
        self.gn = nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.rnn = nn.GRU(32 * 8, 48, batch_first=True)
        self.cls = nn.Linear(48, len(SPECIES))

    def forward(self, x):
        h = F.silu(self.gn(self.stem(x)))
        h = F.silu(self.down(h)).flatten(1, 2).transpose(1, 2)
        out, _ = self.rnn(h.float())
        return self.cls(out.mean(1))


x, y, cut = read_recordings(31)
# balance the species by what the first season's metadata says
counts = torch.bincount(y[:cut], minlength=len(SPECIES))
class_weight = counts.sum() / (len(SPECIES) * counts)  # CAUSE

net = CallNet()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

running = None
for step, lo in enumerate(range(0, len(y), 20), start=1):
    xb, yb = x[lo:lo + 20], y[lo:lo + 20]
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(xb)
    loss = F.cross_entropy(logits.float(), yb, weight=class_weight)  # CAUSE
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
    if step % 6 == 0:
        print(step, f"avg {running:.3f}", f"acc {(logits.argmax(1) == yb).float().mean():.2f}")
