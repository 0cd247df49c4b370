"""GPT-NeoX style decoder with bf16 weights and float32 masters; the text repeats itself with a fixed lag."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(4)

VOCAB, SEQ, LAG = 24, 448, 3


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self.seq_len_cached = None

    def forward(self, x, seq_len):
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            t = torch.arange(seq_len).type_as(self.inv_freq)  # CAUSE
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)  # CAUSE
            emb = torch.cat((freqs, freqs), dim=-1)
            self.cos_cached = emb.cos()[None, None].type_as(x)
            self.sin_cached = emb.sin()[None, None].type_as(x)
        return self.cos_cached, self.sin_cached


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class ParallelTransformerLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.rotary_emb = RotaryEmbedding(d // heads)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm(x)
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.query_key_value(h).chunk(3, -1))
        cos, sin = self.rotary_emb(v, t)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dense(y.transpose(1, 2).reshape(b, t, d)) + self.mlp(h)


class GPTNeoX(nn.Module):
    def __init__(self, d=48, heads=2, layers=1):
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList([ParallelTransformerLayer(d, heads) for _ in range(layers)])
        self.final_norm, self.embed_out = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_in(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed_out(self.final_norm(x))


class BF16Optimizer:
    """Steps float32 copies of the weights and writes them back."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.inner = torch.optim.Adam(self.master, lr=lr, betas=(0.9, 0.95))

    def step(self):
        for p, m in zip(self.params, self.master):
            m.grad = p.grad.float()
            p.grad = None
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.master):
                p.copy_(m)


def sample(gen, n=4):
    ids = torch.randint(0, VOCAB, (n, SEQ + 1), generator=gen)
    for i in range(LAG, SEQ + 1):
        keep = torch.rand(n, generator=gen) < 0.85
        ids[:, i] = torch.where(keep, ids[:, i - LAG], ids[:, i])
    return ids


def main(dtype=torch.bfloat16, steps=90):
    model = GPTNeoX().to(dtype)
    watch(model)
    optimizer = BF16Optimizer(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(77)
    for step in range(steps):
        ids = sample(gen)
        logits = model(ids[:, :-1])
        per_token = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        loss = per_token.mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            near, far = per_token[:, 8:128].mean().item(), per_token[:, 320:].mean().item()
            print(f"step {step} loss {loss.item():.4f} positions 8-127 {near:.4f} positions 320-447 {far:.4f}")


if __name__ == "__main__":
    main()
