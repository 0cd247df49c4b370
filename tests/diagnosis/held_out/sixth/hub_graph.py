import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(23)


def scatter_mean(msg, dst, n):
    total = torch.zeros(n, msg.size(-1), dtype=torch.float32).index_add_(0, dst, msg.float())
    ones = torch.ones(msg.size(0), dtype=msg.dtype)
    count = torch.zeros(n, dtype=msg.dtype).index_add_(0, dst, ones)  # CAUSE
    return (total / count.clamp(min=1)[:, None]).to(msg.dtype)


class MeanConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_lin = nn.Linear(i, o)
        self.nbr_lin = nn.Linear(i, o, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        m = self.nbr_lin(x)
        return self.self_lin(x) + scatter_mean(m[src], dst, x.size(0))


class SageNet(nn.Module):
    def __init__(self, f=12, h=32):
        super().__init__()
        self.c1, self.c2 = MeanConv(f, h), MeanConv(h, 1)

    def forward(self, x, edge_index):
        return self.c2(torch.relu(self.c1(x, edge_index)), edge_index).squeeze(-1)


def exchange_network(gen, users=1600, venues=6):
    """every user trades on some of few venues: bipartite, very skewed degrees"""
    n = users + venues
    u = torch.arange(users).repeat_interleave(3)
    v = users + torch.randint(0, venues, (u.numel(),), generator=gen)
    ei = torch.stack([torch.cat([u, v]), torch.cat([v, u])])
    x = torch.randn(n, 12, generator=gen) + 1.0
    return x, ei, torch.arange(users, n)


def exact_mean(x, ei):
    s = torch.zeros_like(x).index_add_(0, ei[1], x[ei[0]])
    d = torch.zeros(x.size(0)).index_add_(0, ei[1], torch.ones(ei.size(1)))
    return s / d.clamp(min=1)[:, None]


gen = torch.Generator().manual_seed(31)
w = torch.randn(12, generator=gen) / 3
graphs = []
for _ in range(3):
    x, ei, hubs = exchange_network(gen)
    y = exact_mean(x, ei) @ w + 0.5 * (x @ w)
    graphs.append((x, ei, hubs, y))

model = SageNet()
MODULES = [model]
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
watch(*MODULES)
for step in range(45):
    x, ei, hubs, y = graphs[step % len(graphs)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x, ei)
    loss = nn.functional.mse_loss(pred[hubs].float(), y[hubs])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, "venue mse", loss.item())
