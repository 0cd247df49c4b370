"""Discrete-time survival model (logistic hazard), patients with follow-up in monthly bins."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
N_BINS = 10
EPS = 1e-8


class HazardNet(nn.Module):
    def __init__(self, n_feat=12, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_feat, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.out = nn.Linear(hidden, N_BINS)

    def forward(self, x):
        return self.out(self.trunk(x))


def nll_hazard(logits, event_bin, observed):
    bins = torch.arange(N_BINS)
    at_risk_before = (bins[None] < event_bin[:, None]).float()
    at_event = (bins[None] == event_bin[:, None]).float()
    hazard = torch.sigmoid(logits)  # CAUSE
    log_h = F.logsigmoid(logits)
    log_s = torch.log(1 - hazard + EPS)  # CAUSE
    ll = (at_risk_before * log_s).sum(1)
    ll = ll + (at_event * torch.where(observed[:, None], log_h, log_s)).sum(1)
    return -ll.mean()


class Cohort:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(12, generator=self.g)

    def batch(self, n, registry_b=False):
        x = torch.randn(n, 12, generator=self.g)
        risk = x @ self.w
        event = (5.0 - 1.8 * risk).round().clamp(0, N_BINS - 1).long()
        observed = torch.rand(n, generator=self.g) < 0.85
        if registry_b:
            lost = torch.rand(n, generator=self.g) < 0.06
            event = torch.where(lost, torch.full_like(event, N_BINS - 1), event)
            observed = observed & ~lost
        return x, event, observed


net = HazardNet()
MODULES = [net]
cohort = Cohort(5)


def main(n_steps=110):
    watch(*MODULES)
    opt = torch.optim.Adam(net.parameters(), lr=9e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=400)
    losses = []
    for step in range(1, n_steps + 1):
        x, event, observed = cohort.batch(128, registry_b=step > 60)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
            loss = nll_hazard(logits, event, observed)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"{step:4d} nll {sum(losses[-10:]) / 10:.4f} scale {scaler.get_scale():g}")


main()
