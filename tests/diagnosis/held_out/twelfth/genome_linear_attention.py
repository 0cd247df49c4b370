"""Promoter / enhancer tagging of genome windows with kernelised (linear) attention."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(20)


@dataclass
class Config:
    dim: int = 32
    heads: int = 4
    depth: int = 2
    classes: int = 5
    base_len: int = 96
    long_len: int = 1536
    steps: int = 60
    lr: float = 1.5e-3


class KernelAttention(nn.Module):
    """softmax-free attention, phi(q) (phi(k)^T v) / (phi(q) sum phi(k))"""

    def __init__(self, cfg):
        super().__init__()
        self.h = cfg.heads
        self.to_qkv = nn.Linear(cfg.dim, cfg.dim * 3, bias=False)
        self.proj = nn.Linear(cfg.dim, cfg.dim)

    @staticmethod
    def phi(x):
        return F.relu(x).square() + 0.1

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.to_qkv(x).view(n, t, 3, self.h, d // self.h).unbind(2)
        q, k = self.phi(q), self.phi(k)
        state = torch.einsum("nthd,nthe->nhde", k, v)
        mass = torch.einsum("nthd,nhd->nth", q, k.sum(1))  # CAUSE
        out = torch.einsum("nthd,nhde->nthe", q, state) / mass.unsqueeze(-1)  # CAUSE
        return self.proj(out.reshape(n, t, d))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.attn = KernelAttention(cfg)
        self.ff = nn.Sequential(nn.Linear(cfg.dim, 2 * cfg.dim), nn.GELU(), nn.Linear(2 * cfg.dim, cfg.dim))

    def forward(self, x):
        x = x + self.attn(self.ln_a(x) * 2.2)
        return x + self.ff(self.ln_b(x))


class Tagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.base = nn.Embedding(4, cfg.dim)
        self.mix = nn.Conv1d(cfg.dim, cfg.dim, 9, padding=4)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.depth))
        self.out = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, seq):
        x = self.base(seq)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def windows(cfg, seed=3):
    """Length-bucketed windows; a chromosome-scale bucket comes up now and then."""
    g = torch.Generator().manual_seed(seed)
    for i in range(cfg.steps):
        length, n = (cfg.long_len, 1) if i % 23 == 19 else (cfg.base_len, 6)
        seq = torch.randint(0, 4, (n, length), generator=g)
        gc = F.avg_pool1d((seq >= 2).float().unsqueeze(1), 9, 1, 4).squeeze(1)
        yield seq, (gc * (cfg.classes - 1)).round().long()


def train(cfg):
    model = Tagger(cfg)
    watch(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for i, (seq, tag) in enumerate(windows(cfg)):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(seq)
            loss = F.cross_entropy(logits.float().flatten(0, 1), tag.flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if i % 6 == 0 or seq.size(1) > cfg.base_len:
            print(f"{i:3d} len {seq.size(1):5d} loss {loss.item():.3f} scale {scaler.get_scale():g}")
    return model


MODULES = [train(Config())]
