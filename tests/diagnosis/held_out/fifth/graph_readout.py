import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2)


class MoleculeGen:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, step, graphs=8):
        sizes = torch.randint(4, 9, (graphs,), generator=self.g).tolist()
        if step % 11 == 8:
            sizes[3] = 1                # a noble gas
        n = sum(sizes)
        x = torch.randn(n, 10, generator=self.g)
        src, dst, off = [], [], 0
        for s in sizes:
            for i in range(s):
                src += [off + i, off + (i + 1) % s]
                dst += [off + (i + 1) % s, off + i]
            off += s
        return x, torch.tensor([src, dst]), sizes, torch.stack([c.mean(0)[:1] for c in x.split(sizes)])


class SageLayer(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.self_lin, self.nbr_lin = nn.Linear(cin, cout), nn.Linear(cin, cout)

    def forward(self, x, edge_index):
        agg = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])
        deg = torch.zeros(len(x), dtype=x.dtype).index_add_(0, edge_index[1], torch.ones(edge_index.shape[1], dtype=x.dtype))
        return self.self_lin(x) + self.nbr_lin(agg / deg.clamp(min=1)[:, None])


class MomentReadout(nn.Module):
    """Concatenates mean and spread of the node states of each graph."""

    def forward(self, h, sizes):
        rows = []
        for chunk in h.split(sizes):
            mean = chunk.mean(0)
            spread = chunk.std(0)  # CAUSE
            spread = torch.where(spread.isfinite(), spread, torch.zeros_like(spread))
            rows.append(torch.cat([mean, spread]))
        return torch.stack(rows)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.l1, self.l2 = SageLayer(10, width), SageLayer(width, width)
        self.readout = MomentReadout()
        self.mlp = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, x, edge_index, sizes):
        h = torch.relu(self.l1(x, edge_index))
        h = self.l2(h, edge_index)
        return self.mlp(self.readout(h, sizes))


def fit(net, steps=60):
    data = MoleculeGen(33)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11)
    for step in range(steps):
        x, edges, sizes, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x, edges, sizes).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 15 == 0:
            print(f"{step:3d} {loss.item():.4f} scale {scaler.get_scale():g}")


net = Net()
MODULES = [net]
watch(*MODULES)
fit(net)
