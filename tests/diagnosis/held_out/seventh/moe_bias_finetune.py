# Continue training a small sparse model from a converted checkpoint (weights stored in bfloat16).
# Routing is balanced without an auxiliary loss: a per-expert bias is nudged after each batch.
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)
rng = torch.Generator().manual_seed(55)

class Router(nn.Module):
    def __init__(self, dim, n_exp, topk=2, speed=4e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_exp, dim) / dim ** 0.5)
        self.register_buffer("e_bias", torch.zeros(n_exp))
        self.register_buffer("last_load", torch.zeros(n_exp, dtype=torch.long))
        self.topk, self.speed, self.n_exp = topk, speed, n_exp

    def forward(self, x):
        score = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        pick = torch.topk(score + self.e_bias.float(), self.topk, dim=-1).indices
        w = score.gather(-1, pick)
        self.last_load = torch.bincount(pick.flatten(), minlength=self.n_exp)
        return pick, w / w.sum(-1, keepdim=True)

    @torch.no_grad()
    def rebalance(self):
        err = self.last_load.float().mean() - self.last_load.float()
        self.e_bias.add_(self.speed * err.sign())  # CAUSE

class SparseMLP(nn.Module):
    def __init__(self, dim, n_exp=8, hid=32):
        super().__init__()
        self.router = Router(dim, n_exp)
        self.w1 = nn.Parameter(torch.randn(n_exp, dim, hid) / dim ** 0.5)
        self.w2 = nn.Parameter(torch.randn(n_exp, hid, dim) / hid ** 0.5)

    def forward(self, x):
        pick, w = self.router(x)
        every = torch.einsum("nd,edh->neh", x, self.w1)
        every = torch.einsum("neh,ehd->ned", F.silu(every), self.w2)
        chosen = every.gather(1, pick.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return (chosen * w.to(x.dtype).unsqueeze(-1)).sum(1)

class SparseNet(nn.Module):
    def __init__(self, d_in=24, dim=48, classes=12):
        super().__init__()
        self.inp, self.out = nn.Linear(d_in, dim), nn.Linear(dim, classes)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.mlps = nn.ModuleList(SparseMLP(dim) for _ in range(2))

    def forward(self, x):
        h = self.inp(x)
        for n, m in zip(self.norms, self.mlps):
            h = h + m(n(h))
        return self.out(h)

def converted_checkpoint(net):
    sd = net.state_dict()
    for k in sd:
        if k.endswith("e_bias"):
            sd[k] = 5.0 + torch.tensor([0.30, 0.25, 0.0, 0.06, -0.03, 0.03, -0.06, 0.0])
    return sd

net = SparseNet()
net.load_state_dict(converted_checkpoint(net))
net.to(torch.bfloat16)
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=4e-3, betas=(0.9, 0.95), eps=1e-6)
centers = torch.randn(12, 24, generator=rng)
watch(*MODULES)

for step in range(1, 101):
    y = torch.randint(0, 12, (96,), generator=rng)
    x = centers[y] + 0.8 * torch.randn(96, 24, generator=rng)
    loss = F.cross_entropy(net(x.bfloat16()).float(), y)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    for m in net.mlps:
        m.router.rebalance()
    if step % 20 == 0:
        viol = [(m.router.last_load.max() / m.router.last_load.float().mean()).item() for m in net.mlps]
        print(f"{step:4d} loss {loss.item():.3f} max-violation {viol[0]:.2f} {viol[1]:.2f}")
