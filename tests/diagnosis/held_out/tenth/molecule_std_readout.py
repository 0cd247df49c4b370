"""Solubility regression on small molecular graphs; mean and standard deviation read-out per molecule."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)
rng = torch.Generator().manual_seed(77)

def scatter_mean(src, index, n):
    out = src.new_zeros(n, src.size(1)).index_add(0, index, src)
    cnt = torch.bincount(index, minlength=n).clamp(min=1).to(src.dtype)
    return out / cnt[:, None]

class BondConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pre, self.post = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)

    def forward(self, h, src, dst):
        msg = torch.tanh(self.pre(torch.cat([h[src], h[dst]], -1)))
        agg = scatter_mean(msg, dst, h.size(0))
        return h + torch.tanh(self.post(torch.cat([h, agg], -1)))

class MeanStdReadout(nn.Module):
    def forward(self, h, batch, n):
        with torch.autocast("cpu", enabled=False):
            h = h.float()
            mean = scatter_mean(h, batch, n)
            var = scatter_mean((h - mean[batch]) ** 2, batch, n)
            return torch.cat([mean, var.sqrt()], dim=-1)  # CAUSE

class SolubilityNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.atom = nn.Linear(6, dim)
        self.layers = nn.ModuleList(BondConv(dim) for _ in range(2))
        self.readout = MeanStdReadout()
        self.out = nn.Linear(2 * dim, 1)

    def forward(self, g):
        h = self.atom(g["x"])
        for layer in self.layers:
            h = layer(h, g["src"], g["dst"])
        return self.out(self.readout(h, g["batch"], g["n_graphs"])).squeeze(-1)

def ring(k):
    i = torch.arange(k)
    j = (i + 1) % k
    return torch.cat([i, j]), torch.cat([j, i])

def make_batch(with_ion):
    xs, src, dst, batch, off = [], [], [], [], 0
    for m in range(10):
        k = 1 if (with_ion and m == 4) else int(torch.randint(5, 9, (1,), generator=rng))
        s, d = ring(k) if k > 1 else (torch.empty(0, dtype=torch.long),) * 2
        xs.append(torch.randn(k, 6, generator=rng))
        src.append(s + off), dst.append(d + off), batch.append(torch.full((k,), m))
        off += k
    x = torch.cat(xs)
    b = torch.cat(batch)
    y = scatter_mean(x[:, :1] * 0.8 + x[:, 1:2].abs(), b, 10).squeeze(-1)
    return dict(x=x, src=torch.cat(src), dst=torch.cat(dst), batch=b, n_graphs=10), y

loader = [make_batch(with_ion=(i == 18)) for i in range(25)]
net = SolubilityNet()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.RMSprop(net.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2000)
for epoch in range(3):
    running = 0.0
    for graph, target in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = net(graph)
            loss = nn.functional.huber_loss(pred.float(), target)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        running += loss.item()
    print(f"epoch {epoch} huber {running / len(loader):.4f} scale {scaler.get_scale():g}")
