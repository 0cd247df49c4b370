import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)


class Features(nn.Module):
    """small frozen feature pyramid standing in for a pretrained backbone"""

    def __init__(self):
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.stage2 = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        a = self.stage1(x)
        return a, self.stage2(a)


def gram(f):
    n, c, h, w = f.shape
    f = f.reshape(n, c, h * w)
    g = torch.bmm(f, f.transpose(1, 2))  # CAUSE
    return g / (c * h * w)


def perceptual(vgg, out, content, style):
    fo, fc, fs = vgg(out), vgg(content), vgg(style)
    c = (fo[1] - fc[1]).float().pow(2).mean()
    s = sum((gram(a) - gram(b)).float().pow(2).sum((1, 2)).mean() for a, b in zip(fo, fs))
    return c, s


vgg = Features().eval()
net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.InstanceNorm2d(24, affine=True), nn.ReLU(),
                    nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 3, 3, padding=1))
MODULES = [net, vgg]


def train(iters=48, style_weight=1e-2):
    g = torch.Generator().manual_seed(77)
    opt = torch.optim.Adam(net.parameters(), 2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(*MODULES)
    history = []
    for it in range(1, iters + 1):
        content = torch.rand(2, 3, 32, 32, generator=g) * 4
        exposure = 2.0 ** torch.randint(0, 6, (2, 1, 1, 1), generator=g)
        style = torch.rand(2, 3, 32, 32, generator=g) * exposure
        with torch.autocast("cpu", dtype=torch.float16):
            out = content + net(content)
            c, s = perceptual(vgg, out, content, style)
        loss = c + style_weight * s
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        history.append(loss.item())
    return history


print(train()[-3:])
