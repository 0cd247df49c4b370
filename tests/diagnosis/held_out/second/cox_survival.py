import math
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)
gen = torch.Generator().manual_seed(11)


class RiskNet(nn.Module):
    def __init__(self, n_cov, width=64):
        super().__init__()
        self.embed_site = nn.Embedding(6, 8)
        self.body = nn.Sequential(nn.Linear(n_cov + 8, width), nn.ELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ELU())
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, x, site):
        h = self.body(torch.cat([x, self.embed_site(site)], dim=1))
        return self.out(h).squeeze(1)


def cox_ph_loss(log_h, durations, events):
    order = durations.argsort(descending=True)
    log_h, events = log_h[order], events[order]
    risk_set = torch.exp(log_h).cumsum(0)  # CAUSE
    log_risk = torch.log(risk_set)
    return -((log_h - log_risk) * events).sum() / events.sum().clamp(min=1)


def concordance(log_h, durations, events):
    ok = (durations[:, None] < durations[None, :]) & events[:, None].bool()
    return ((log_h[:, None] > log_h[None, :]) & ok).sum().item() / ok.sum().item()


N, P = 4096, 12
beta = torch.randn(P, generator=gen) * 1.6
cov = torch.randn(N, P, generator=gen)
site = torch.randint(0, 6, (N,), generator=gen)
true_risk = cov @ beta + 0.3 * site.float()
u = torch.rand(N, generator=gen).clamp(1e-4, 1 - 1e-4)
t_event = -torch.log(u) * torch.exp(-0.9 * true_risk)
t_cens = torch.rand(N, generator=gen) * 20
durations = torch.minimum(t_event, t_cens)
events = (t_event <= t_cens).float()

net = RiskNet(P)
MODULES = [net]
watch(*MODULES)
opt = torch.optim.AdamW(net.parameters(), lr=8e-3, weight_decay=1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(90):
    idx = torch.randint(0, N - 512, (384,), generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = cox_ph_loss(net(cov[idx], site[idx]), durations[idx], events[idx])
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if step % 15 == 14:
        net.eval()
        with torch.no_grad():
            c = concordance(net(cov[-512:], site[-512:]), durations[-512:], events[-512:])
        net.train()
        print(f"step {step + 1} partial nll {loss.item():.4f} c-index {c:.3f} scale {scaler.get_scale():g}")
