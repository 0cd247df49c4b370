import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(7)
D, E, TOK = 24, 4, 1000


def cv_squared(x):
    # squared coefficient of variation, pushes a positive distribution towards uniform
    eps = 1e-6
    if x.shape[0] == 1:
        return x.new_zeros(())
    return x.var() / (x.mean() ** 2 + eps)  # CAUSE


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(d, h), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseMoE(nn.Module):
    def __init__(self, d, n_exp, hidden=32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w_gate = nn.Linear(d, n_exp, bias=False)
        self.w_noise = nn.Linear(d, n_exp, bias=False)
        self.experts = nn.ModuleList(Expert(d, hidden) for _ in range(n_exp))

    def forward(self, x, noise):
        h = self.norm(x)
        clean = self.w_gate(h)
        logits = clean + noise.to(clean.dtype) * F.softplus(self.w_noise(h)) * 0.1
        gates = torch.softmax(logits, dim=-1)
        top, idx = gates.topk(1, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (idx[:, 0] == e).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, (expert(h[rows]) * top[rows]).to(out.dtype))
        importance = gates.sum(0)
        return x + out, 0.002 * cv_squared(importance)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, D)
        self.moe = SparseMoE(D, E)
        self.head = nn.Linear(D, 10)

    def forward(self, x, noise):
        y, aux = self.moe(self.inp(x), noise)
        return self.head(y), aux


g = torch.Generator().manual_seed(70)
centers = 2.0 * torch.randn(4, 16, generator=g)
teacher = torch.randn(16, 10, generator=g)


def tokens(step):
    """mixed corpus first, then single-domain shards, as the loader walks the shard list"""
    if step < 35:
        dom = torch.randint(0, 4, (TOK,), generator=g)
    else:
        dom = torch.full((TOK,), 2)
    x = centers[dom] + 0.4 * torch.randn(TOK, 16, generator=g)
    return x, (x @ teacher).argmax(-1)


net = Net()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=500)

for step in range(80):
    x, y = tokens(step)
    noise = torch.randn(TOK, E, generator=g)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, aux = net(x, noise)
        ce = F.cross_entropy(logits, y)
        loss = ce + aux
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(f"{step} ce {ce.item():.4f} aux {aux.item():.5f}")
print("scale", scaler.get_scale())
