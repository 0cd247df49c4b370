"""Graph transformer: hop distances (inf between components) enter the attention as a fixed slope per head."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(110)
gen = torch.Generator().manual_seed(111)
NODES, HEADS, D = 14, 4, 32


def hop_distance(adj):
    dist = torch.full(adj.shape, float("inf"))
    dist.diagonal(dim1=1, dim2=2).zero_()
    reach = torch.eye(adj.shape[1]).expand_as(adj) > 0
    for hop in range(1, NODES):
        new = (reach.float() @ adj > 0) & ~reach
        dist[new] = float(hop)
        reach = reach | new
    return dist


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.ff = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.register_buffer("slope", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x, dist):
        n = x.shape[1]
        q, k, v = self.qkv(self.norm1(x)).view(-1, n, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        bias = -self.slope.view(1, HEADS, 1, 1) * dist.unsqueeze(1)
        att = (q @ k.transpose(-1, -2) / (D // HEADS) ** 0.5 + bias).softmax(-1)
        x = x + self.proj((att.to(v.dtype) @ v).transpose(1, 2).reshape(-1, n, D))
        return x + self.ff(self.norm2(x))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(4, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(D, 1)

    def forward(self, kinds, dist):
        h = self.kind(kinds)
        for layer in self.layers:
            h = layer(h, dist)
        return self.out(h).squeeze(-1)


def graphs(n=16):
    up = torch.triu((torch.rand(n, NODES, NODES, generator=gen) < 0.11).float(), 1)
    adj = up + up.transpose(1, 2)
    kinds = torch.randint(0, 4, (n, NODES), generator=gen)
    dist = hop_distance(adj)
    weight = torch.exp(-dist)
    label = (weight @ (kinds == 2).float().unsqueeze(-1)).squeeze(-1)
    return kinds, dist, label


net = GraphNet()
MODULES = [net]


def fit(steps):
    watch(*MODULES)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=12)
    for s in range(1, steps + 1):
        kinds, dist, label = graphs()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(kinds, dist).float(), label)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        if s % 15 == 0:
            cut = torch.isinf(dist).float().mean().item()
            print(f"{s} mse {loss.item():.4f} disconnected pairs {cut:.2f} scale {scaler.get_scale():.0f}")


fit(60)
