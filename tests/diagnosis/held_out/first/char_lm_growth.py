import argparse
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x):
        ang = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq)
        cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.rope = Rotary(d // heads)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        att = self.rope(q) @ self.rope(k).transpose(-1, -2) / math.sqrt(d // self.h)
        mask = torch.triu(torch.full((t, t), -math.inf), 1)
        att = torch.softmax(att.float() + mask, -1).to(v.dtype)
        x = x + self.o((att @ v).transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return x + self.w3(F.silu(self.w1(h)) * self.w2(h))


class GPT(nn.Module):
    def __init__(self, vocab, d=40, heads=2, depth=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        nn.init.normal_(self.wte.weight, std=0.05)
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.norm(self.blocks(self.wte(ids))))


args = argparse.Namespace(steps=90, lr=2e-3, bs=12, block=24, clip=1.0)
torch.set_num_threads(1)
torch.manual_seed(1001)
gen = torch.Generator().manual_seed(1002)
text = ("the quick brown fox jumps over the lazy dog and runs away from the old grey wolf. " * 30)
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
model = GPT(len(chars))
MODULES = [model]
watch(*MODULES)
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=12)

for it in range(args.steps):
    for group in opt.param_groups:
        group["lr"] = args.lr * min(1.0, (it + 1) / 15)
    at = torch.randint(0, len(data) - args.block - 1, (args.bs,), generator=gen)
    xb = torch.stack([data[i:i + args.block] for i in at.tolist()])
    yb = torch.stack([data[i + 1:i + args.block + 1] for i in at.tolist()])
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(xb)
        loss = F.cross_entropy(logits.float().flatten(0, 1), yb.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    if it % 10 == 9:
        print(f"iter {it + 1}: loss {loss.item():.4f}, scale 2^{int(math.log2(scaler.get_scale()))}")
