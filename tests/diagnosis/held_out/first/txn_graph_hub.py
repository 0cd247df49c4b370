import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(8)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(2024)

N_NODES, N_FEAT, N_EDGES = 600, 16, 9000
feat = torch.randn(N_NODES, N_FEAT, generator=g)
src = torch.randint(0, N_NODES, (N_EDGES,), generator=g)
dst = torch.randint(0, N_NODES - 1, (N_EDGES,), generator=g)
# an exchange wallet that nearly half of the transfers end in
hub = torch.rand(N_EDGES, generator=g) < 0.4
dst[hub] = N_NODES - 1
amount = torch.distributions.LogNormal(3.2, 0.6).icdf(torch.rand(N_EDGES, 1, generator=g).clamp(1e-4, 1 - 1e-4))
label = (feat[:, :4].sum(1) + 0.3 * torch.randn(N_NODES, generator=g) > 0).long()


class SumConv(nn.Module):
    """message = W h_j * gate(amount_ij), aggregated by a plain sum (GIN-style)"""

    def __init__(self, cin, cout):
        super().__init__()
        self.lin, self.gate, self.root = nn.Linear(cin, cout), nn.Linear(1, cout), nn.Linear(cin, cout)
        self.norm = nn.LayerNorm(cout)

    def forward(self, h, src, dst, amount):
        msg = F.relu(self.lin(h))[src] * F.softplus(self.gate(amount))
        agg = torch.zeros(h.size(0), msg.size(1), dtype=msg.dtype)
        agg.index_add_(0, dst, msg)  # CAUSE
        return F.relu(self.norm(agg + self.root(h)))


class WalletNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.conv1, self.conv2 = SumConv(N_FEAT, hidden), SumConv(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, src, dst, amount):
        h = self.conv1(x, src, dst, amount)
        return self.out(self.conv2(h, src, dst, amount))


def sample_edges(step):
    """edge sampler: a few transfers at first, nearly all of them at the end of the curriculum"""
    keep = 0.1 + 0.9 * min(1.0, step / 50)
    return torch.nonzero(torch.rand(N_EDGES, generator=g) < keep).squeeze(1)


net = WalletNet()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
watch(*MODULES)

for step in range(70):
    e = sample_edges(step)
    with torch.autocast("cpu", torch.float16):
        logits = net(feat, src[e], dst[e], amount[e])
        loss = F.cross_entropy(logits.float(), label)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if (step + 1) % 10 == 0:
        acc = (logits.argmax(1) == label).float().mean()
        print(f"{step + 1}: edges {len(e)} loss {loss.item():.4f} acc {acc:.3f}")
