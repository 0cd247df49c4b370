import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)

VOCAB, D, FF, SENTINEL = 96, 64, 128, 95

class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        var = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(var + 1e-6))

class GatedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.wo = nn.Linear(FF, D, bias=False)

    def forward(self, x):
        hidden = nn.functional.gelu(self.wi_0(x)) * self.wi_1(x)  # CAUSE
        return self.wo(hidden)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = RMSNorm(D), RMSNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.ff = GatedFeedForward()

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        att = (q @ k.transpose(1, 2) / math.sqrt(D)).softmax(-1)
        x = x + self.proj(att @ v)
        return x + self.ff(self.ln2(x))

class Encoder(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for blk in self.blocks:
            x = checkpoint(blk, x, use_reentrant=False)
        return self.head(x)

def load_released_weights(net):
    """Stands in for the released checkpoint: a few channels carry very large activations."""
    with torch.no_grad():
        net.emb.weight[SENTINEL].mul_(0.05)[3] = 6.0
        ff = net.blocks[0].ff
        ff.wi_0.weight[7, 3] = ff.wi_1.weight[7, 3] = 36.0
        ff.wo.weight[:, 7].mul_(0.002)

def batches(n, g):
    for i in range(n):
        ids = torch.randint(0, 90, (8, 24), generator=g)
        labels = (ids + 1) % 90
        ids[2, 5] = SENTINEL if i == 36 else ids[2, 5]
        yield ids, labels

encoder = Encoder()
load_released_weights(encoder)
MODULES = [encoder]
watch(*MODULES)
opt = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
for step, (ids, labels) in enumerate(batches(60, torch.Generator().manual_seed(8)), 1):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = encoder(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 6 == 1:
        print(step, round(loss.item(), 4))
