"""Frame labelling with a locality prior on self-attention (learnable window), weights kept in half."""
import copy
import math
import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(3)
torch.set_num_threads(1)


class LocalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.dk = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.log_sigma = nn.Parameter(torch.log(torch.tensor([4.0, 16.0])))

    def prior(self, n, like):
        pos = torch.arange(n, dtype=like.dtype)
        rel = pos[None, :] - pos[:, None]
        dist = rel.pow(2)  # CAUSE
        inv = torch.exp(-2 * self.log_sigma)
        return -0.5 * dist[None] * inv[:, None, None]

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, self.dk).permute(2, 0, 3, 1, 4)
        s = (q @ k.transpose(-1, -2)) / math.sqrt(self.dk)
        a = torch.softmax(s + self.prior(n, s), dim=-1)
        return self.proj((a @ v).transpose(1, 2).reshape(b, n, c))


class Tagger(nn.Module):
    def __init__(self, feat=12, dim=16, classes=5):
        super().__init__()
        self.inp = nn.Linear(feat, dim)
        self.att = LocalAttention(dim, 2)
        self.ln = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.inp(x)
        return self.out(self.ln(h + self.att(h)))


gen = torch.Generator().manual_seed(31)
mix = torch.randn(12, 5, generator=gen)


def utterances(n_frames):
    x = torch.randn(2, n_frames, 12, generator=gen)
    smooth = nn.functional.avg_pool1d(x.transpose(1, 2), 5, 1, 2).transpose(1, 2)
    return x, (smooth @ mix).argmax(-1)


model = Tagger().half()
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
length_schedule = [64] * 15 + [128] * 15 + [192] * 10 + [320] * 15

best, best_state = float("inf"), None
for it, n in enumerate(length_schedule, 1):
    frames, tags = utterances(n)
    logits = model(frames.half())
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    (loss * 64).backward()
    for p in model.parameters():
        p.grad.div_(64)
    optimizer.step()
    if loss.item() < best:
        best, best_state = loss.item(), copy.deepcopy(model.state_dict())
    if it % 5 == 0:
        print(it, n, round(loss.item(), 4), "sigma", model.att.log_sigma.detach().float().exp().tolist())
