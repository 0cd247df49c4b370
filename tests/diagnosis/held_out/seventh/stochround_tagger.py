"""Memory-lean fine-tuning: parameters and momentum live in bfloat16, writes are rounded stochastically."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(9)
data_rng = torch.Generator().manual_seed(1)
round_rng = torch.Generator().manual_seed(2)


def copy_stochastic_(dst, src):
    bits = src.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=round_rng)
    dst.copy_(((bits + noise) & -65536).view(torch.float32))


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p, dtype=torch.float32)
                st["t"] += 1
                grad = p.grad.float()
                m = st["m"].float().mul_(b1).add_(grad, alpha=1 - b1)
                st["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                copy_stochastic_(st["m"], m)
                mhat = m / (1 - b1 ** st["t"])
                vhat = st["v"] / (1 - b2 ** st["t"])
                copy_stochastic_(p, p.float() - group["lr"] * mhat / (vhat.sqrt() + group["eps"]))


class Tagger(nn.Module):
    def __init__(self, vocab=60, dim=48, tags=7):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.left = nn.Linear(dim, dim)
        self.right = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, tags)

    def forward(self, ids):
        e = self.emb(ids)
        h = e + torch.tanh(self.left(F.pad(e, (0, 0, 1, 0))[:, :-1])) + torch.tanh(self.right(F.pad(e, (0, 0, 0, 1))[:, 1:]))
        return self.out(self.norm(h))


model = Tagger().bfloat16()
MODULES = [model]
opt = LeanAdam(model.parameters(), lr=4e-4)
table = torch.randint(0, 7, (60,), generator=data_rng)


def sentences(n=32, t=14):
    ids = torch.randint(0, 60, (n, t), generator=data_rng)
    y = table[ids]
    y[:, 1:] = torch.where(ids[:, :-1] % 5 == 0, (y[:, 1:] + 1) % 7, y[:, 1:])
    return ids, y


watch(*MODULES)
for step in range(1, 111):
    ids, y = sentences()
    loss = F.cross_entropy(model(ids).float().flatten(0, 1), y.flatten())
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if step % 22 == 0:
        print(f"{step:4d} loss {loss.item():.4f}")
