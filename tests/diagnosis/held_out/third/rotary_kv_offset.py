import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)


def rope(x, start, base=200.0):
    d = x.size(-1)
    inv_freq = base ** (-torch.arange(0, d, 2).float() / d)
    pos = torch.arange(start, start + x.size(-2)).to(x)  # CAUSE
    ang = pos[:, None] * inv_freq
    cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x, start):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        q, k = rope(q, start), rope(k, start)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(o.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, vocab=16, d=64):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, 2)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, start=0):
        x = self.tok(ids)
        x = x + self.attn(self.ln1(x), start)
        return self.head(x + self.mlp(self.ln2(x)))


gen = torch.Generator().manual_seed(141)
model = Decoder()
MODULES = [model]
opt = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
watch(*MODULES)
for step in range(1, 121):
    ids = torch.randint(0, 16, (16, 40), generator=gen)
    want = ids.roll(2, dims=1)                     # repeat the token two places back
    start = int(torch.randint(700, 1900, (1,), generator=gen))   # window somewhere in a long document
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids, start)
    loss = F.cross_entropy(logits[:, 2:].float().reshape(-1, 16), want[:, 2:].reshape(-1))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 30 == 0:
        print(step, f"{loss.item():.4f}")
