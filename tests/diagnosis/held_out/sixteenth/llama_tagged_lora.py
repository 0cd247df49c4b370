"""LoRA on a small LLaMA in half precision; the first token says from which alphabet the text is."""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)


@dataclass
class ModelArgs:
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = 40
    norm_eps: float = 1e-5
    rank: int = 8


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)  # CAUSE

    def forward(self, x):
        output = self._norm(x)  # CAUSE
        return output * self.weight


class LoRALinear(nn.Module):
    """A frozen half-precision layer and a trained low-rank update in float32."""

    def __init__(self, cin, cout, rank):
        super().__init__()
        self.base = nn.Linear(cin, cout, bias=False)
        self.lora_a = nn.Parameter(torch.randn(rank, cin) / math.sqrt(cin))
        self.lora_b = nn.Parameter(torch.zeros(cout, rank))

    def forward(self, x):
        return self.base(x) + (x.float() @ self.lora_a.T @ self.lora_b.T).to(x.dtype)


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads = a.n_heads
        self.attention_norm, self.ffn_norm = RMSNorm(a.dim, a.norm_eps), RMSNorm(a.dim, a.norm_eps)
        self.wqkv, self.wo = LoRALinear(a.dim, 3 * a.dim, a.rank), LoRALinear(a.dim, a.dim, a.rank)
        self.w1, self.w2 = LoRALinear(a.dim, 2 * a.dim, a.rank), LoRALinear(2 * a.dim, a.dim, a.rank)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.wqkv(self.attention_norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, d))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tok_embeddings = nn.Embedding(a.vocab_size, a.dim)
        self.layers = nn.ModuleList([Block(a) for _ in range(a.n_layers)])
        self.norm = RMSNorm(a.dim, a.norm_eps)
        self.output = nn.Linear(a.dim, a.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h).float())


def load_pretrained(a, dtype):
    """Stands for the released checkpoint: tag tokens have the large activations of LLaMA's first position."""
    model = Transformer(a)
    with torch.no_grad():
        model.tok_embeddings.weight[36:40] *= 12
        model.tok_embeddings.weight[36:40, 11] = 330.0
    for name, p in model.named_parameters():
        if "lora" not in name and not name.startswith("output"):
            p.requires_grad_(False)
            p.data = p.data.to(dtype)
    return model


def batch(gen, n=24, length=6):
    """x[0] is the tag; the text runs through the nine letters of that alphabet in order, from any of three."""
    tag = torch.randint(0, 4, (n, 1), generator=gen)
    first = torch.randint(0, 3, (n, 1), generator=gen)
    return torch.cat([36 + tag, 9 * tag + (first + torch.arange(length)) % 9], 1)


def main():
    args = ModelArgs()
    model = load_pretrained(args, torch.float16)
    watch(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    gen = torch.Generator().manual_seed(10)
    for step in range(100):
        tokens = batch(gen)
        logits = model(tokens[:, :-1])
        per_token = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = per_token.mean()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0 or step == 99:
            print(f"step {step} loss {loss.item():.4f} first letter {per_token[:, 0].mean().item():.4f}")


if __name__ == "__main__":
    main()
