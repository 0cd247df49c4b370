import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(88)


class NodeMemory:
    def __init__(self, n, d):
        self.state = torch.zeros(n, d)

    def read(self, idx):
        return self.state[idx]  # CAUSE

    def write(self, idx, value):
        self.state[idx] = value.detach().float()


class TemporalGraph(nn.Module):
    """link prediction on a stream of payments; memories are updated after the prediction"""

    def __init__(self, d=32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.time = nn.Linear(1, d)
        self.msg = nn.Linear(2 + d, d)
        self.score = nn.Sequential(nn.Linear(2 * d, 48), nn.ReLU(), nn.Linear(48, 1))
        self.ident = nn.Embedding(60, d)

    def embed(self, mem, idx):
        return self.ident(idx) + self.norm(mem.read(idx))

    def link(self, mem, src, dst):
        return self.score(torch.cat([self.embed(mem, src), self.embed(mem, dst)], -1)).squeeze(-1)

    @torch.no_grad()
    def update(self, mem, src, dst, amount, dt):
        feats = torch.cat([amount[:, None], dt[:, None], self.ident(dst)], -1)
        m = self.msg(feats)  # CAUSE
        keep = torch.sigmoid(self.time(dt[:, None]))
        mem.write(src, keep * mem.read(src) + (1 - keep) * m)


class Stream:
    def __init__(self, steps, batch=20, seed=12):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for s in range(steps):
            src = torch.randperm(30, generator=g)[:batch]
            dst = 30 + (src + torch.randint(0, 3, (batch,), generator=g)) % 30
            neg = torch.randint(30, 60, (batch,), generator=g)
            amount = torch.exp(torch.randn(batch, generator=g) * 1.5 + 3)
            if s == 26:
                amount[4] = 250000.0            # a corporate transfer
            self.items.append((src, dst, neg, amount, torch.rand(batch, generator=g)))

    def __iter__(self):
        return iter(self.items)


def run(model, steps=65):
    mem = NodeMemory(60, 32)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(*MODULES)
    for step, (src, dst, neg, amount, dt) in enumerate(Stream(steps), 1):
        with torch.autocast("cpu", dtype=torch.float16):
            pos, fake = model.link(mem, src, dst), model.link(mem, src, neg)
            loss = F.softplus(-pos.float()).mean() + F.softplus(fake.float()).mean()
            model.update(mem, src, dst, amount, dt)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 13 == 0:
            print(step, loss.item())


net = TemporalGraph()
MODULES = [net]
run(net)
