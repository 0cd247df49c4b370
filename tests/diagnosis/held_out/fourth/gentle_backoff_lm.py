import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

ap = argparse.ArgumentParser()
ap.add_argument("--updates", type=int, default=110)
ap.add_argument("--lr", type=float, default=3e-3)
ap.add_argument("--scale-window", type=int, default=4)
ap.add_argument("--scale-shrink", type=float, default=0.999)
cfg, _ = ap.parse_known_args([])

torch.set_num_threads(1)
torch.manual_seed(1)
V, T, B, D = 32, 24, 16, 48


class Mixer(nn.Module):
    """token shift + gated channel mixing"""

    def __init__(self, d):
        super().__init__()
        self.shift = nn.Parameter(torch.full((d,), 0.5))
        self.ln = nn.LayerNorm(d)
        self.k, self.r, self.v = nn.Linear(d, 2 * d), nn.Linear(d, d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.ln(x)
        prev = F.pad(h, (0, 0, 1, 0))[:, :-1]
        h = torch.lerp(h.float(), prev.float(), self.shift)
        return x + torch.sigmoid(self.r(h)) * self.v(F.relu(self.k(h)))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.h = nn.Sequential(Mixer(D), Mixer(D))
        self.out = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        return self.out(self.h(self.wte(ids)))


gen = torch.Generator().manual_seed(66)
trans = torch.softmax(2.5 * torch.randn(V, V, generator=gen), -1)


def corpus():
    ids = torch.randint(0, V, (B, 1), generator=gen)
    for _ in range(T):
        nxt = torch.multinomial(trans[ids[:, -1]], 1, generator=gen)
        ids = torch.cat([ids, nxt], dim=1)
    return ids[:, :-1], ids[:, 1:]


lm = LM()
MODULES = [lm]
watch(*MODULES)
opt = torch.optim.AdamW(lm.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=cfg.scale_window, backoff_factor=cfg.scale_shrink)  # CAUSE
num_updates = 0
while num_updates < cfg.updates:
    src, tgt = corpus()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = lm(src)
        loss = F.cross_entropy(logits.view(-1, V), tgt.reshape(-1))
    opt.zero_grad()
    scaler.scale(loss).backward()  # CAUSE
    scaler.unscale_(opt)
    gnorm = nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    num_updates += 1
    if num_updates % 10 == 0:
        print(f"update {num_updates} | nll {loss.item():.3f} | gnorm {gnorm.item():.3f} | loss_scale {scaler.get_scale():.0f}")
