import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(79)


class KahanAdam(torch.optim.Optimizer):
    """Adam for bfloat16 weights; what is rounded away from a weight is kept for the next step"""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"] = torch.zeros_like(p, dtype=torch.float32)
                    s["v"] = torch.zeros_like(p, dtype=torch.float32)
                    s["comp"] = torch.zeros_like(p)
                s["t"] += 1
                g = p.grad.float()
                s["m"].lerp_(g, 1 - b1)
                s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                mhat, vhat = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
                s["comp"].add_((-group["lr"] * mhat / (vhat.sqrt() + group["eps"])).to(p.dtype))
                old = p.clone()
                p.add_(s["comp"])
                s["comp"].add_(old.sub_(p))


class Bigram(nn.Module):
    def __init__(self, vocab=40, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.norm = nn.RMSNorm(d)
        self.up, self.gate, self.down = nn.Linear(d, 96), nn.Linear(d, 96), nn.Linear(96, d)
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, tok):
        h = self.emb(tok)
        n = self.norm(h)
        return self.out(h + self.down(nn.functional.silu(self.gate(n)) * self.up(n)))


gen = torch.Generator().manual_seed(83)
table = torch.softmax(2.5 * torch.randn(40, 40, generator=gen), -1)

lm = Bigram().bfloat16()
MODULES = [lm]
opt = KahanAdam(lm.parameters(), lr=5e-4)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (k + 1) / 10))
watch(*MODULES)

first = torch.cat([p.detach().float().flatten() for p in lm.parameters()])
for step in range(110):
    tok = torch.randint(0, 40, (256,), generator=gen)
    nxt = torch.multinomial(table[tok], 1, generator=gen).squeeze(1)
    loss = nn.functional.cross_entropy(lm(tok).float(), nxt)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm.step()
    if step % 20 == 0:
        now = torch.cat([p.detach().float().flatten() for p in lm.parameters()])
        print(f"{step:3d} {loss.item():.3f} moved {(now != first).float().mean().item():.2f} {(now - first).norm().item():.3f}")
