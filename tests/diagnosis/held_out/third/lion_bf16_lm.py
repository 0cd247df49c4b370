import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(27)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.g


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float32))
                grad = p.grad.float()
                direction = (b1 * m + (1 - b1) * grad).sign()
                p.add_(direction.to(p.dtype), alpha=-group["lr"])  # CAUSE
                m.lerp_(grad, 1 - b2)


class GLUBlock(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.norm = RMSNorm(d)
        self.up = nn.Linear(k * d, 2 * d)
        self.down = nn.Linear(d, d)
        self.k = k

    def forward(self, x):
        h = F.pad(self.norm(x), (0, 0, self.k - 1, 0))
        h = torch.cat([h[:, i:i + x.size(1)] for i in range(self.k)], -1)
        a, b = self.up(h).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class ConvLM(nn.Module):
    def __init__(self, vocab=20, d=40, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.Sequential(*[GLUBlock(d, 3) for _ in range(depth)])
        self.norm = RMSNorm(d)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.out(self.norm(self.blocks(self.emb(ids))))


def text(g, b=16, t=24):
    x = torch.randint(0, 20, (b, 2), generator=g)
    cols = list(x.unbind(1))
    for _ in range(t - 1):
        cols.append((3 * cols[-1] + cols[-2] + 1) % 20)
    return torch.stack(cols, 1)


lm = ConvLM()
with torch.no_grad():
    for p in lm.parameters():                     # values as they come from a long pretraining
        p.copy_(p + 0.05 * p.sign())
lm.bfloat16()
MODULES = [lm]
opt = Lion(lm.parameters(), lr=4e-5)
g = torch.Generator().manual_seed(270)
watch(*MODULES)
for step in range(1, 101):
    seq = text(g)
    logits = lm(seq[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 25 == 0:
        print(step, round(loss.item(), 4))
