import math
import torch
from torch import nn
from torch.nn import functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)

class GlobalResponse(nn.Module):
    """Contrast between channels, NCHW flavour."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.eps = eps

    def forward(self, x):
        energy = x.pow(2).sum(dim=(2, 3), keepdim=True)  # CAUSE
        gx = energy.add(self.eps).sqrt()
        nx = gx / (gx.mean(dim=1, keepdim=True) + self.eps)
        return self.gamma * (x * nx) + self.beta + x

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pw1 = nn.Conv2d(width, 2 * width, 1)
        self.grn = GlobalResponse(2 * width)
        self.pw2 = nn.Conv2d(2 * width, width, 1)

    def forward(self, x):
        return x + self.pw2(self.grn(F.relu(self.pw1(self.dw(x)))))

class Net(nn.Module):
    def __init__(self, width=16, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, classes)

    def forward(self, img):
        h = self.body(self.stem(img))
        return self.head(h.mean(dim=(2, 3)))

gen = torch.Generator().manual_seed(21)
PROTO = torch.rand(5, 3, 4, 4, generator=gen)

def sample(n, res):
    cls = torch.randint(0, 5, (n,), generator=gen)
    base = F.interpolate(PROTO[cls], size=(res, res), mode="bilinear", align_corners=False)
    noise = 0.15 * torch.randn(n, 3, res, res, generator=gen)
    return ((base + noise) * 255.0).clamp(0, 255) / 8.0, cls

RESOLUTIONS = [(0, 8), (16, 12), (30, 20), (44, 32)]

def resolution_at(it):
    return [r for start, r in RESOLUTIONS if it >= start][-1]

net = Net()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.SGD(net.parameters(), lr=2e-3, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.5 * (1 + math.cos(math.pi * k / 60)))

it = 0
while it < 60:
    img, cls = sample(24, resolution_at(it))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(img), cls, label_smoothing=0.05)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if it % 6 == 0:
        print(f"it {it:3d} res {img.shape[-1]} loss {loss.item():.4f}")
    it += 1
