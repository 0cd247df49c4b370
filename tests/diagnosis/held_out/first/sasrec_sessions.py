import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)
ITEMS, MAXLEN, DIM = 80, 16, 32


class SASRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.pos = nn.Embedding(MAXLEN, DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.ff = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0.1), nn.Linear(DIM, DIM))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(DIM) for _ in range(3))
        self.rating_head = nn.Linear(DIM, 1)          # used by another product, not trained here

    def forward(self, seq):
        n = seq.shape[1]
        x = self.item(seq) + self.pos(torch.arange(n))
        h = self.n1(x)
        score = self.q(h) @ self.k(h).transpose(1, 2) / DIM ** 0.5
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        visible = causal & (seq != 0)[:, None, :]
        visible = visible | torch.eye(n, dtype=torch.bool)        # left padding attends to itself
        score = score.masked_fill(~visible, -torch.inf)
        x = x + torch.softmax(score, -1) @ self.v(h)
        return self.n3(x + self.ff(self.n2(x)))


def sessions(n, gen):
    """walks on an item graph, left padded, some users have a single event"""
    nxt = torch.arange(1, ITEMS + 1).roll(-3)
    seq = torch.zeros(n, MAXLEN + 1, dtype=torch.long)
    length = torch.randint(2, MAXLEN + 2, (n,), generator=gen)
    cur = torch.randint(1, ITEMS + 1, (n,), generator=gen)
    for j in range(MAXLEN + 1):
        on = j >= MAXLEN + 1 - length
        seq[:, j] = torch.where(on, cur, torch.zeros_like(cur))
        jump = torch.rand(n, generator=gen) < 0.15
        cur = torch.where(jump, torch.randint(1, ITEMS + 1, (n,), generator=gen), nxt[cur - 1])
    return seq[:, :-1], seq[:, 1:]


class EMA:
    def __init__(self, model, decay):
        self.shadow, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


gen = torch.Generator().manual_seed(611)
model = SASRec()
ema = EMA(model, 0.97)
MODULES = [model, ema.shadow]
watch(*MODULES)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
for step in range(100):
    src, tgt = sessions(32, gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model(src)
        logits = h @ model.item.weight[1:].t()
    keep = tgt != 0
    loss = F.cross_entropy(logits.float()[keep], tgt[keep] - 1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    ema.update(model)
    if step % 20 == 19:
        src, tgt = sessions(64, gen)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            top = (ema.shadow(src)[:, -1] @ ema.shadow.item.weight[1:].t()).float().topk(5).indices + 1
        print(f"step {step + 1} loss {loss.item():.3f} hit@5 {(top == tgt[:, -1:]).any(1).float().mean():.3f}")
