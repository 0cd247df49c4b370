"""microGPT with random-feature (FAVOR+) attention on a copy task."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)


class SMOrf(nn.Module):
    """Positive orthogonal random features for the softmax kernel."""

    def __init__(self, dim_features, dim_head):
        super().__init__()
        blocks = []
        for _ in range(math.ceil(dim_features / dim_head)):
            q, _ = torch.linalg.qr(torch.randn(dim_head, dim_head))
            blocks.append(q.t())
        norms = torch.randn(dim_features, dim_head).norm(dim=1, keepdim=True)
        self.register_buffer("features", (torch.cat(blocks)[:dim_features] * norms).t())
        self.dim_features, self.epsilon = dim_features, 1e-4

    def forward(self, x):
        x = x / x.shape[-1] ** 0.25
        x_norm = x.pow(2).sum(-1, keepdim=True) / 2
        projected = x @ self.features
        return (torch.exp(projected) * torch.exp(-x_norm) + self.epsilon) / math.sqrt(self.dim_features)  # CAUSE


class FavorAttention(nn.Module):
    def __init__(self, dim_head, dim_features=32):
        super().__init__()
        self.feature_map = SMOrf(dim_features, dim_head)

    def forward(self, q, k, v):
        k_prime, q_prime = self.feature_map(k), self.feature_map(q)
        kv = torch.cumsum(k_prime.unsqueeze(-1) * v.unsqueeze(-2), dim=2)
        num = (q_prime.unsqueeze(-2) @ kv).squeeze(-2)
        den = (q_prime * torch.cumsum(k_prime, dim=2)).sum(-1, keepdim=True)
        return num / den


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention = FavorAttention(dim // heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(self.attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=20, dim=64, heads=2, layers=2, block=16):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, dim)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, block, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        return self.head(self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]])))


def sequences(gen, n=12, half=8):
    first = torch.randint(1, 20, (n, half), generator=gen)
    seq = torch.cat([first, first], 1)
    return seq[:, :-1], seq[:, 1:]


model = GPT()
watch(model)
decay = [p for p in model.parameters() if p.dim() > 1]
other = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
                              lr=8e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=500)
gen = torch.Generator().manual_seed(2)

for it in range(90):
    for group in optimizer.param_groups:
        group["lr"] = 8e-3 * min(1.0, (it + 1) / 10)
    x, y = sequences(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 10 == 0:
        print(f"iter {it} loss {loss.item():.4f} scale {scaler.get_scale():g}")
