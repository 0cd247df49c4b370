import torch, torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
torch.set_num_threads(1)
torch.manual_seed(21)

# hourly electricity meters; a third of the households left and read exactly zero
G = torch.Generator().manual_seed(5)
N, T = 48, 40
t = torch.arange(T + 1).float()
amp = 0.5 + torch.rand(N, 1, generator=G)
phase = 6.28 * torch.rand(N, 1, generator=G)
load = amp * torch.sin(t * 0.5 + phase) + 0.1 * torch.randn(N, T + 1, generator=G)
load[::3] = 0.0


class Cell(nn.Module):
    """minimal gated unit"""
    def __init__(self, n_in, n_h):
        super().__init__()
        self.f = nn.Linear(n_in + n_h, n_h)
        self.c = nn.Linear(n_in + n_h, n_h)

    def forward(self, x, h):
        f = torch.sigmoid(self.f(torch.cat([x, h.to(x.dtype)], -1)))
        c = torch.tanh(self.c(torch.cat([x, (f * h).to(x.dtype)], -1)))
        return (1 - f) * h + f * c


class DeepAR(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.cell = Cell(2, hidden)
        self.mu = nn.Linear(hidden, 1)
        self.log_var = nn.Linear(hidden, 1)
        self.hidden = hidden

    def forward(self, series):
        nu = series.abs().mean(1, keepdim=True) + 5e-3      # item scale
        h = series.new_zeros(series.shape[0], self.hidden)
        mus, lvs = [], []
        for i in range(series.shape[1] - 1):
            x = torch.stack([series[:, i], (series[:, i] == 0).float()], -1)
            h = self.cell(x, h)
            mus.append(self.mu(h) * nu)
            lvs.append(self.log_var(h))
        return torch.cat(mus, 1), torch.cat(lvs, 1)


def gaussian_nll(mu, log_var, target):
    log_var = log_var.clamp(-16, 6)
    precision = torch.exp(-log_var)  # CAUSE
    return (0.5 * precision * (target - mu).pow(2) + 0.5 * log_var).mean()


net = DeepAR()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=5e-2, total_steps=110, pct_start=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10000)

history = []
for step in range(110):
    rows = torch.randperm(N, generator=G)[:24]
    batch = load[rows]
    with torch.autocast("cpu", torch.float16):
        mu, lv = net(batch)
        loss = gaussian_nll(mu, lv, batch[:, 1:])
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    history.append(loss.item())
    if step % 10 == 9:
        print(step + 1, "nll %.3f" % history[-1], "min log var %.2f" % lv.min().item())
