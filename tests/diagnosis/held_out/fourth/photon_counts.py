import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(59)


class StaticScaler:
    """Fixed power-of-two scale; gradients are divided in place before anybody looks at them."""

    def __init__(self, scale):
        self.scale_value = float(scale)
        self.bad_steps = 0

    def scale(self, loss):
        return loss * self.scale_value

    @torch.no_grad()
    def unscale(self, params):
        for p in params:
            if p.grad is not None:
                p.grad.div_(self.scale_value)

    def step(self, optimizer, params):
        if all(torch.isfinite(p.grad).all() for p in params if p.grad is not None):
            optimizer.step()
        else:
            self.bad_steps += 1


class CountNet(nn.Module):
    def __init__(self, d=10, width=64):
        super().__init__()
        self.f1, self.f2 = nn.Linear(d, width), nn.Linear(width, width)
        self.rate = nn.Linear(width, 1)
        nn.init.constant_(self.rate.bias, 5.0)

    def forward(self, x):
        h = torch.relu(self.f1(x))
        h = torch.relu(self.f2(h))
        return self.rate(h).squeeze(-1)


gen = torch.Generator().manual_seed(404)
w_true = 0.35 * torch.randn(10, generator=gen)
net = CountNet()
MODULES = [net]
watch(*MODULES)
params = list(net.parameters())
opt = torch.optim.SGD(params, lr=1.5e-3, momentum=0.9)
amp = StaticScaler(2.0 ** -4)
MICRO = 4
norms = []

for update in range(75):
    warm = min(1.0, (update + 1) / 15)
    for group in opt.param_groups:
        group["lr"] = 1.5e-3 * warm
    opt.zero_grad()
    total, seen = 0.0, 0
    for _ in range(MICRO):
        n = int(torch.randint(20, 44, (1,), generator=gen))
        x = torch.randn(n, 10, generator=gen)
        counts = torch.poisson(torch.exp(6.0 + x @ w_true), generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            log_rate = net(x)
        log_rate = log_rate.float().clamp(max=12.0)
        nll = (torch.exp(log_rate) - counts * log_rate).sum()
        amp.scale(nll).backward()
        total, seen = total + nll.item(), seen + n
    amp.unscale(params)
    for p in params:
        p.grad.div_(seen)
    norm = nn.utils.clip_grad_norm_(params, 20.0).item()
    norms.append(norm)
    amp.step(opt, params)
    if update % 10 == 0:
        print(f"update {update} summed nll {total:.1f} per event {total / seen:.2f} |g| {norm:.1f} bad {amp.bad_steps}")
