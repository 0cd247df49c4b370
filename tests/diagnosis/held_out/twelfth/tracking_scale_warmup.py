"""Siamese correlation tracker on moving blobs."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(123)


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1), nn.GroupNorm(4, cout), nn.SiLU())


class SiamTracker(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.backbone = nn.Sequential(conv(1, width, 2), conv(width, width), nn.Conv2d(width, width, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, template, search):
        z, x = self.backbone(template), self.backbone(search)
        n, c, h, w = x.shape
        response = F.conv2d(x.reshape(1, n * c, h, w), z, groups=n, padding=z.shape[-1] // 2)
        return response.transpose(0, 1)[:, 0, :h, :w] / (c * z.shape[-1]) + self.bias


def sequence_pairs(n=8, seed=9):
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(24.0)
    while True:
        pos = torch.randint(4, 20, (n, 2), generator=g)
        sigma = 1.0 + torch.rand(n, generator=g)
        d2 = ((grid.view(1, 1, -1) - pos[:, 0].view(n, 1, 1)) ** 2
              + (grid.view(1, -1, 1) - pos[:, 1].view(n, 1, 1)) ** 2)
        search = torch.exp(-d2 / (2 * sigma.view(n, 1, 1) ** 2)) + 0.1 * torch.randn(n, 24, 24, generator=g)
        c2 = (torch.arange(8.0).view(1, 1, -1) - 4) ** 2 + (torch.arange(8.0).view(1, -1, 1) - 4) ** 2
        template = torch.exp(-c2 / (2 * sigma.view(n, 1, 1) ** 2))
        yield template.unsqueeze(1), search.unsqueeze(1), pos // 2


class WarmScale:
    """2^start, one bit more every few iterations until 2^top."""

    def __init__(self, start=6, top=30, every=2):
        self.start, self.top, self.every = start, top, every

    def at(self, it):
        return 2.0 ** min(self.start + it // self.every, self.top)


net = SiamTracker()
MODULES = [net]
watch(net)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
warm = WarmScale()
scaler = torch.amp.GradScaler("cpu", init_scale=warm.at(0))
applied = 0
opt.register_step_post_hook(lambda *_: globals().__setitem__("applied", applied + 1))
for it, (template, search, cell) in zip(range(64), sequence_pairs()):
    with torch.autocast("cpu", dtype=torch.float16):
        response = net(template, search)
    target = cell[:, 1] * response.shape[-1] + cell[:, 0]
    loss = F.cross_entropy(response.float().flatten(1), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update(warm.at(it + 1))  # CAUSE
    if it % 8 == 7:
        print(f"{it + 1:3d} loss {loss.item():.4f} scale {scaler.get_scale():.3g} updates {applied}")
