import math
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)
PAD, BOS, V, D, H, L = 0, 1, 26, 32, 4, 12
NEG = float("-inf")


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.o = nn.Linear(D, D)

    def forward(self, x, blocked):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / math.sqrt(D // H)
        score = score.masked_fill(blocked[:, None], NEG)
        y = score.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, D))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.pos = nn.Parameter(torch.randn(L, D) * 0.02)
        self.attn = nn.ModuleList([Attn(), Attn()])
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)) for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, ids, lengths):
        t = ids.shape[1]
        future = torch.ones(t, t).triu(1).bool()
        pad = torch.arange(t)[None, None, :] >= lengths[:, None, None]
        blocked = future[None] | pad
        x = self.emb(ids) + self.pos[:t]
        for i in range(2):
            x = x + self.attn[i](self.ln[2 * i](x), blocked)
            x = x + self.mlp[i](self.ln[2 * i + 1](x))
        return self.head(x)


# grammar: after an even symbol an odd one has to follow and vice versa, specials never
parity = torch.arange(V) % 2
ALLOWED = parity[:, None] != parity[None, :]
ALLOWED[:, PAD] = ALLOWED[:, BOS] = False
gen = torch.Generator().manual_seed(90)
BIGRAM = torch.rand(V, V, generator=gen).pow(4) * ALLOWED


def batch(n=32):
    lengths = torch.randint(3, L + 1, (n,), generator=gen)
    ids = torch.full((n, 1), BOS)
    for _ in range(L):
        ids = torch.cat([ids, torch.multinomial(BIGRAM[ids[:, -1]], 1, generator=gen)], 1)
    valid = torch.arange(L)[None] < lengths[:, None]
    return ids[:, :-1], ids[:, 1:].masked_fill(~valid, -100), lengths


dec = Decoder()
MODULES = [dec]
watch(*MODULES)
opt = torch.optim.Adam(dec.parameters(), lr=3e-3, betas=(0.9, 0.98))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=1000)
for it in range(80):
    src, tgt, lengths = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = dec(src, lengths)
    logp = logits.float().masked_fill(~ALLOWED[src], NEG).log_softmax(-1)
    loss = F.nll_loss(logp.flatten(0, 1), tgt.flatten(), ignore_index=-100)
    with torch.no_grad():
        p = logp.exp()
        entropy = -torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0:
        print(f"{it} nll {loss.item():.4f} entropy {entropy.item():.4f} min logp {logp.min().item()}")
