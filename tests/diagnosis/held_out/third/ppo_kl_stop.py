import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(91)
N_OBS, N_ACT = 10, 7


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(N_OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, N_ACT), nn.Linear(64, 1)

    def forward(self, obs, legal):
        h = self.body(obs)
        logits = self.pi(h).float().masked_fill(~legal, float("-inf"))
        return F.log_softmax(logits, -1), self.v(h).float().squeeze(-1)


def entropy(logp):
    return -torch.where(logp.isinf(), 0.0, logp.exp() * logp.masked_fill(logp.isinf(), 0.0)).sum(-1)


def kl(p, q):
    """KL(p||q) over the legal actions"""
    ok = ~p.isinf()
    return (p.exp() * torch.where(ok, p - torch.where(ok, q, 0.0), 0.0)).sum(-1)


class Batch:
    def __init__(self, g, table, policy, n=96):
        self.obs = torch.randn(n, N_OBS, generator=g)
        self.legal = torch.rand(n, N_ACT, generator=g) > 0.4
        self.legal[:, 0] = True                       # passing is always allowed
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.logp, v = policy(self.obs, self.legal)
        self.act = torch.multinomial(self.logp.exp(), 1, generator=g)
        self.ret = (self.obs @ table).gather(1, self.act).squeeze(1)
        adv = self.ret - v
        self.adv = (adv - adv.mean()) / (adv.std() + 1e-5)


policy = Policy()
MODULES = [policy]
g = torch.Generator().manual_seed(910)
table = torch.randn(N_OBS, N_ACT, generator=g) * 0.5
pi_opt = torch.optim.Adam([*policy.body.parameters(), *policy.pi.parameters()], lr=6e-3)
v_opt = torch.optim.Adam(policy.v.parameters(), lr=1e-2)
beta, limit = 0.5, 0.05
watch(*MODULES)
stopped = 0
for it in range(12):
    b = Batch(g, table, policy)
    go = True
    for epoch in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp, v = policy(b.obs, b.legal)
        d = kl(b.logp, logp).mean()
        if d.item() > limit:                          # policy rests, the value head goes on
            go, stopped = False, stopped + 1
        ratio = (logp.gather(1, b.act) - b.logp.gather(1, b.act)).squeeze(1).exp()
        gain = torch.min(ratio * b.adv, ratio.clamp(0.8, 1.2) * b.adv).mean()
        v_loss = F.mse_loss(v, b.ret)
        loss = 0.5 * v_loss + (beta * d - gain - 0.01 * entropy(logp).mean() if go else 0.0)
        pi_opt.zero_grad(set_to_none=True)
        v_opt.zero_grad(set_to_none=True)
        loss.backward()
        if go:
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            pi_opt.step()
        v_opt.step()
    beta = beta * 1.5 if d.item() > limit * 1.5 else beta / 1.5 if d.item() < limit / 1.5 else beta
    if it % 4 == 3:
        print(it, round(b.ret.mean().item(), 3), "kl", round(d.item(), 4), "beta", round(beta, 3), "stopped", stopped)
