"""Discrete VAE with Gumbel-softmax codes, bf16 autocast, temperature and KL annealing, validation between the steps."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(73)
CODES, DIM = 24, 12


class DVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, CODES, 3, padding=1))
        self.book = nn.Embedding(CODES, DIM)
        self.dec = nn.Sequential(nn.ConvTranspose2d(DIM, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1))
        # codes 20.. are reserved for a later stage and must not be drawn yet
        allowed = torch.zeros(CODES)
        allowed[20:] = float("-inf")
        self.register_buffer("allowed", allowed)

    def forward(self, x, tau, gen):
        logits = self.enc(x).float() + self.allowed.view(1, -1, 1, 1)
        if self.training:
            u = torch.rand(logits.shape, generator=gen).clamp(1e-6, 1 - 1e-6)
            w = ((logits - torch.log(-torch.log(u))) / tau).softmax(1)
        else:
            w = F.one_hot(logits.argmax(1), CODES).permute(0, 3, 1, 2).float()
        q = torch.einsum("bkhw,kd->bdhw", w, self.book.weight)
        logp = logits.log_softmax(1)
        p = logp.exp()
        kl = torch.where(p > 0, p * (logp.clamp(min=-80.0) + math.log(20)), torch.zeros_like(p)).sum(1).mean()
        return self.dec(q), kl


def glyphs(gen, n=16):
    img = torch.zeros(n, 1, 12, 12)
    for i in range(n):
        r, c = torch.randint(1, 8, (2,), generator=gen).tolist()
        img[i, 0, r:r + 4, c] = 1
        img[i, 0, r, c:c + 4] = 1
    return img


net = DVAE()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.05, 1.0, total_iters=15)
gen = torch.Generator().manual_seed(37)
held_out = glyphs(torch.Generator().manual_seed(999), 32)
watch(*MODULES)
best = float("inf")
for step in range(100):
    tau = max(0.5, 2.0 * 0.98 ** step)
    net.train()
    opt.zero_grad()
    for _ in range(2):
        x = glyphs(gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rec, kl = net(x, tau, gen)
        loss = F.binary_cross_entropy_with_logits(rec.float(), x) + 0.002 * min(1.0, step / 50) * kl
        (loss / 2).backward()
    opt.step()
    warmup.step()
    if step % 20 == 19:
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            rec, _ = net(held_out, tau, gen)
        val = F.binary_cross_entropy_with_logits(rec.float(), held_out).item()
        best = min(best, val)
        print(step + 1, f"train {loss.item():.4f} val {val:.4f} best {best:.4f} kl {kl.item():.3f}")
