# Masked residue modelling on toy protein families.
import torch
import torch.nn as nn
import torch.nn.functional as F
from contextlib import ExitStack

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

AA, MASK, L, D = 20, 20, 24, 40


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class ResidueModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(AA + 1, D), nn.Parameter(0.02 * torch.randn(L, D))
        self.blocks = nn.Sequential(Block(D), Block(D))
        self.lm = nn.Linear(D, AA)

    def forward(self, seq):
        return self.lm(self.blocks(self.tok(seq) + self.pos))


class Families:
    def __init__(self, k=8, seed=88):
        self.g = torch.Generator().manual_seed(seed)
        self.parents = torch.randint(0, AA, (k, L), generator=self.g)

    def batch(self, n=32):
        seq = self.parents[torch.randint(0, len(self.parents), (n,), generator=self.g)].clone()
        mutate = torch.rand(n, L, generator=self.g) < 0.05
        seq[mutate] = torch.randint(0, AA, (int(mutate.sum()),), generator=self.g)
        hide = torch.rand(n, L, generator=self.g) < 0.15
        return seq.masked_fill(hide, MASK), seq, hide


def pretrain(model, data, steps=100):
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=10_000)
    watch(*MODULES)
    with ExitStack() as session:
        session.enter_context(torch.autocast("cpu", dtype=torch.float16))  # CAUSE
        for step in range(1, steps + 1):
            seen, seq, hide = data.batch()
            logits = model(seen)
            loss = F.cross_entropy(logits[hide].float(), seq[hide])
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            if step % 20 == 0:
                acc = (logits[hide].argmax(-1) == seq[hide]).float().mean()
                print(f"{step:4d} loss {loss.item():.3f} acc {acc.item():.3f}")


torch.set_num_threads(1)
torch.manual_seed(30)
net = ResidueModel()
MODULES = [net]
pretrain(net, Families())
