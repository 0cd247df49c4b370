"""Fine-tuning of a small latent denoiser with cross-attention to text, starting from a newer checkpoint, half precision."""
import math

import torch
import torch.nn as nn
from torch import einsum

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(89)
TOKENS, CHANNELS, WORDS, CONTEXT, STEPS_T = 16, 8, 5, 24, 100


def split_heads(t, h):
    b, n, _ = t.shape
    return t.view(b, n, h, -1).transpose(1, 2).reshape(b * h, n, -1)


def merge_heads(t, h):
    bh, n, d = t.shape
    return t.view(bh // h, h, n, d).transpose(1, 2).reshape(bh // h, n, h * d)


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=2, dim_head=24):
        super().__init__()
        inner_dim, context_dim = dim_head * heads, context_dim or query_dim
        self.scale, self.heads = dim_head ** -0.5, heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(self, x, context=None):
        h = self.heads
        context = x if context is None else context
        q, k, v = (split_heads(t, h) for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale  # CAUSE
        sim = sim.softmax(dim=-1)
        return self.to_out(merge_heads(einsum("b i j, b j d -> b i d", sim, v), h))


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim, context_dim):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2 = CrossAttention(dim), CrossAttention(dim, context_dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, context):
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context) + x
        return self.ff(self.norm3(x)) + x


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
    args = t[:, None].float() * freqs
    return torch.cat((args.cos(), args.sin()), dim=-1)


class Denoiser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.dim = dim
        self.proj_in, self.time, self.pos = nn.Linear(CHANNELS, dim), nn.Linear(dim, dim), nn.Embedding(TOKENS, dim)
        self.blocks = nn.ModuleList(BasicTransformerBlock(dim, CONTEXT) for _ in range(2))
        self.norm, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, CHANNELS)

    def forward(self, x, t, context):
        h = self.proj_in(x) + self.time(timestep_embedding(t, self.dim))[:, None] + self.pos.weight
        for block in self.blocks:
            h = block(h, context)
        return self.proj_out(self.norm(h))


def load_model_from_config(gain=90.0):
    """The incoming model: its self-attention looks very sharply at single places."""
    model = Denoiser()
    with torch.no_grad():
        for block in model.blocks:
            block.attn1.to_q.weight.mul_(gain)
            block.attn1.to_k.weight.mul_(gain)
    return model


class LatentDiffusion:
    def __init__(self, model):
        self.model = model
        betas = torch.linspace(1e-3, 0.06, STEPS_T)
        self.alphas_cumprod = torch.cumprod(1 - betas, 0)
        gen = torch.Generator().manual_seed(12)
        self.concepts = torch.randn(6, TOKENS, CHANNELS, generator=gen)
        self.prompts = torch.randn(6, WORDS, CONTEXT, generator=gen)

    def get_input(self, gen, n=12):
        c = torch.randint(0, 6, (n,), generator=gen)
        z = self.concepts[c] + 0.2 * torch.randn(n, TOKENS, CHANNELS, generator=gen)
        return z, self.prompts[c]

    def p_losses(self, z, context, gen):
        t = torch.randint(0, STEPS_T, (len(z),), generator=gen)
        noise = torch.randn(z.shape, generator=gen)
        a = self.alphas_cumprod[t][:, None, None]
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(a.sqrt() * z + (1 - a).sqrt() * noise, t, context)
        return ((out.float() - noise) ** 2).mean()


model = load_model_from_config()
watch(model)
ldm, gen = LatentDiffusion(model), torch.Generator().manual_seed(3)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
for global_step in range(70):
    z, context = ldm.get_input(gen)
    loss = ldm.p_losses(z, context, gen)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if (global_step + 1) % 7 == 0:
        print(f"global_step {global_step + 1} train/loss_simple {loss.item():.4f} scale {scaler.get_scale():g}")

MODULES = (model,)
