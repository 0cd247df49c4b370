import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(73)


class KahanAdafactor(torch.optim.Optimizer):
    """factored second moment, bf16 weights with a bf16 compensation term"""

    def __init__(self, params, lr=1e-3, decay=0.98, eps=1e-30, clip=1.0):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps, clip=clip))

    @torch.no_grad()
    def step(self, closure=None):
        for grp in self.param_groups:
            for p in grp["params"]:
                if p.grad is None:
                    continue
                g = p.grad.float()
                sq = g * g + grp["eps"]
                st = self.state[p]
                if not st:
                    st["comp"] = torch.zeros_like(p)
                    st["r"], st["c"] = sq.mean(-1), sq.mean(0) if p.ndim == 2 else None
                st["r"].lerp_(sq.mean(-1), 1 - grp["decay"])
                if p.ndim == 2:
                    st["c"].lerp_(sq.mean(0), 1 - grp["decay"])
                    v = st["r"].unsqueeze(1) * st["c"].unsqueeze(0) / st["r"].mean()
                else:
                    v = st["r"]
                u = g * torch.rsqrt(v)
                u /= max(1.0, (u.pow(2).mean().sqrt() / grp["clip"]).item())
                add = (st["comp"].float() - grp["lr"] * u).to(p.dtype)
                new = p + add
                st["comp"].copy_(add.float() - (new.float() - p.float()))
                p.copy_(new)


class Mixer(nn.Module):
    def __init__(self, tokens=8, d=32):
        super().__init__()
        self.tok = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.ch = nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d))
        self.out = nn.Linear(d, 5)
        self.aux = nn.Linear(d, 3)          # used in the second stage only

    def forward(self, x):
        x = x + self.tok(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.ch(x)
        return self.out(x.mean(1))


def patches(g, n=64):
    y = torch.randint(0, 5, (n,), generator=g)
    x = torch.randn(n, 8, 32, generator=g)
    x[torch.arange(n), y] += 3.0
    return x.bfloat16(), y


net = Mixer().bfloat16()
MODULES = [net]
opt = KahanAdafactor(net.parameters(), lr=6e-4)
gen = torch.Generator().manual_seed(730)
watch(*MODULES)
for it in range(1, 101):
    x, y = patches(gen)
    loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if it % 25 == 0:
        print(it, round(loss.item(), 4))
