import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)
gen = torch.Generator().manual_seed(3)


class SelectiveSSM(nn.Module):
    """h_t = a_t * h_{t-1} + dt_t * x_t, evaluated chunk by chunk in closed form."""

    def __init__(self, d, chunk=32):
        super().__init__()
        self.chunk = chunk
        self.in_proj = nn.Linear(d, 2 * d)
        self.dt_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)
        self.log_rate = nn.Parameter(torch.linspace(-2.5, -1.2, d))
        nn.init.constant_(self.dt_proj.bias, -1.0)

    def scan(self, x, dt):
        rate = self.log_rate.exp().to(dt.dtype)
        h = x.new_zeros(x.size(0), x.size(2))
        ys = []
        for xc, dc in zip(x.split(self.chunk, 1), dt.split(self.chunk, 1)):
            s = torch.cumsum(dc * rate, dim=1)
            grow = torch.exp(s)
            acc = torch.cumsum(grow * dc * xc, dim=1)  # CAUSE
            y = torch.exp(-s) * (h.unsqueeze(1) + acc)
            h = y[:, -1]
            ys.append(y)
        return torch.cat(ys, 1)

    def forward(self, u):
        x, z = self.in_proj(u).chunk(2, -1)
        dt = F.softplus(self.dt_proj(u))
        return self.out_proj(self.scan(x, dt) * F.silu(z))


class Forecaster(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Linear(3, d)
        self.norm = nn.LayerNorm(d)
        self.mix = SelectiveSSM(d)
        self.head = nn.Linear(d, 1)

    def forward(self, s):
        h = self.embed(s)
        h = h + self.mix(self.norm(h))
        return self.head(h).squeeze(-1)


def sample(n=8, length=96):
    t = torch.arange(length) / 12.0
    ph = torch.rand(n, 1, generator=gen) * 6.28
    a = torch.sin(t + ph) + 0.1 * torch.randn(n, length, generator=gen)
    b = torch.cos(0.5 * t + ph)
    gap = torch.randint(1, 4, (n, length), generator=gen).float()
    return torch.stack([a, b, gap], -1)[:, :-1], (a + 0.3 * gap)[:, 1:].roll(1, 1)


model = Forecaster()
MODULES = [model]
opt = torch.optim.AdamW(model.parameters(), lr=1.5e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
watch(*MODULES)
for step in range(60):
    s, y = sample()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(s)
    loss = F.mse_loss(pred.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 20 == 19:
        print(step, loss.item())
