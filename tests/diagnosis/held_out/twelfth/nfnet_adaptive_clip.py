"""Normaliser-free image classifier (scaled weight standardisation) with adaptive gradient clipping."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)


class WSConv2d(nn.Conv2d):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        w = self.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
        w = (w - mean) * torch.rsqrt(var * w[0].numel() + 1e-4) * self.gain
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class NFBlock(nn.Module):
    def __init__(self, c, beta, alpha=0.2):
        super().__init__()
        self.beta, self.alpha = beta, alpha
        self.c1, self.c2 = WSConv2d(c, c, 3, padding=1), WSConv2d(c, c, 3, padding=1)

    def forward(self, x):
        h = self.c1(F.gelu(x / self.beta) * 1.7)
        return x + self.alpha * self.c2(F.gelu(h) * 1.7)


class NFNet(nn.Module):
    def __init__(self, c=12, classes=6):
        super().__init__()
        self.stem = WSConv2d(3, c, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(NFBlock(c, 1.0))
        self.head = nn.Linear(c, classes)

    def forward(self, x):
        return self.head(F.gelu(self.blocks(self.stem(x))).mean((2, 3)))


def unitwise_norm(x):
    if x.ndim <= 1:
        return x.norm(2)
    return x.flatten(1).norm(2, dim=1).view(-1, *[1] * (x.ndim - 1))


@torch.no_grad()
def adaptive_clip_grad(parameters, clip_factor=0.02, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        limit = unitwise_norm(p).clamp_(min=eps) * clip_factor
        norm = unitwise_norm(p.grad)
        p.grad.copy_(torch.where(norm < limit, p.grad, p.grad * (limit / norm.clamp(min=1e-6))))


class ShapeImages:
    def __init__(self, n=24, size=12):
        self.n, self.size, self.g = n, size, torch.Generator().manual_seed(90)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        r = (xx.square() + yy.square()).sqrt()
        self.maps = torch.stack([r < 0.5, (r > 0.4) & (r < 0.8), xx.abs() < 0.3, yy.abs() < 0.3,
                                 (xx + yy).abs() < 0.3, (xx - yy).abs() < 0.3]).float()

    def __next__(self):
        y = torch.randint(0, 6, (self.n,), generator=self.g)
        tint = torch.rand(self.n, 3, 1, 1, generator=self.g) + 0.5
        return self.maps[y].unsqueeze(1) * tint + 0.3 * torch.randn(
            self.n, 3, self.size, self.size, generator=self.g), y


def fit(steps=50):
    net, data = NFNet(), ShapeImages()
    watch(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=200)
    for it in range(steps):
        x, y = next(data)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=0.05)
        sgd.zero_grad()
        scaler.scale(loss).backward()
        adaptive_clip_grad(net.parameters())  # CAUSE
        scaler.step(sgd)
        scaler.update()
        if it % 10 == 9:
            print(f"{it + 1} loss {loss.item():.4f} acc {(logits.argmax(1) == y).float().mean():.2f}")
    return net


MODULES = [fit()]
