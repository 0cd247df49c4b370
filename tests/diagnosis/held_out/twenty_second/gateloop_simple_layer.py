"""Language model of simple gate loop layers with the Heinsen scan, half-precision activations under autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(4)
VOCAB, DIM, SEQ_LEN, BATCH, NUM_BATCHES, DEPTH = 24, 32, 32, 8, 100, 2


def abs_clamp_eps(t, eps=1e-20):
    return torch.sign(t) * t.abs().clamp(min=eps)


def heinsen_associative_scan(a, kv, eps=1e-20):
    log_a = a.clamp(min=eps).log()  # CAUSE
    log_kv = abs_clamp_eps(kv, eps).to(dtype=torch.complex64).log()
    a_star = torch.cumsum(log_a.float(), dim=1)
    log_x0_plus_b_star = torch.logcumsumexp(log_kv - a_star, dim=1)
    log_x = a_star + log_x0_plus_b_star
    return log_x.exp().real.to(kv.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale, self.gamma = dim ** 0.5, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x.float(), dim=-1) * self.scale * self.gamma


class SimpleGateLoopLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.to_qkva, self.out = RMSNorm(dim), nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.to_qkva.weight[2 * dim:].data, std=0.74)

    def forward(self, x):
        q, kv, a = self.to_qkva(self.norm(x)).chunk(3, dim=-1)
        out = heinsen_associative_scan(a.sigmoid(), kv)
        return self.out(q * out)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return self.net(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([nn.ModuleList([SimpleGateLoopLayer(DIM), FeedForward(DIM)]) for _ in range(DEPTH)])
        self.norm, self.to_logits = RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x):
        x, labels = x[:, :-1], x[:, 1:]
        x = self.token_emb(x)
        for gateloop, ff in self.layers:
            x = gateloop(x) + x
            x = ff(x) + x
        logits = self.to_logits(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Counters:
    """Documents that count upwards with a step of their own; token 0 ends a document."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def row(self):
        ids = []
        while len(ids) < SEQ_LEN + 1:
            start, step, n = (int(torch.randint(lo, hi, (1,), generator=self.gen)) for lo, hi in ((0, 23), (1, 4), (5, 11)))
            ids += [0] + [1 + (start + step * i) % (VOCAB - 1) for i in range(n)]
        return torch.tensor(ids[:SEQ_LEN + 1])

    def __next__(self):
        return torch.stack([self.row() for _ in range(BATCH)])


model = Transformer()
watch(model)
optim = torch.optim.Adam(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
train_loader = Counters(1)
for i in range(NUM_BATCHES):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(next(train_loader))
    scaler.scale(loss).backward()
    scaler.unscale_(optim)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optim)
    scaler.update()
    optim.zero_grad()
    if (i + 1) % 10 == 0:
        print(f"training loss {loss.item():.3f} scale {scaler.get_scale():g}")
MODULES = (model,)
