import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(73)


class ConvNeXtish(nn.Module):
    def __init__(self, c=16, k=5):
        super().__init__()
        self.patch = nn.Conv2d(3, c, 4, stride=4)
        self.dw = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.norm = nn.GroupNorm(1, c)
        self.pw = nn.Sequential(nn.Conv2d(c, 3 * c, 1), nn.GELU(), nn.Conv2d(3 * c, c, 1))
        self.gamma = nn.Parameter(torch.full((c, 1, 1), 0.1))
        self.head = nn.Linear(c, k)

    def forward(self, x):
        x = self.patch(x)
        x = x + self.gamma * self.pw(self.norm(self.dw(x)))
        return self.head(x.amax((2, 3)))


def ascend(params, scale, rho):
    """w + e with e = rho * g / |g|; None if the gradient overflowed"""
    grads = [p.grad / scale for p in params]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    if not torch.isfinite(norm):
        return None
    eps = [g * (rho / (norm + 1e-12)) for g in grads]
    with torch.no_grad():
        torch._foreach_add_(params, eps)
    return eps


def loss_of(net, x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.functional.cross_entropy(net(x).float(), y, label_smoothing=0.05)


def run(net, steps=70, rho=0.05):
    gen = torch.Generator().manual_seed(16)
    protos = torch.randn(5, 3, 16, 16, generator=gen)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=6)
    watch(*MODULES)
    for i in range(steps):
        y = torch.randint(0, 5, (32,), generator=gen)
        x = protos[y] + 1.5 * torch.randn(32, 3, 16, 16, generator=gen)
        opt.zero_grad()
        first = loss_of(net, x, y)
        scaler.scale(first).backward()
        eps = ascend(params, scaler.get_scale(), rho)
        if eps is not None:
            opt.zero_grad()
            scaler.scale(loss_of(net, x, y)).backward()
            with torch.no_grad():
                torch._foreach_sub_(params, eps)
        scaler.step(opt)
        scaler.update()
        if i % 10 == 0:
            print(i, f"{first.item():.3f}", scaler.get_scale())


model = ConvNeXtish()
MODULES = [model]
run(model)
