import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(44)
gen = torch.Generator().manual_seed(44)


class Bank(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1, dtype=torch.long))
        self.at = 0

    @torch.no_grad()
    def push(self, z, y):
        idx = (self.at + torch.arange(len(z))) % len(self.keys)
        self.keys[idx], self.labels[idx] = z.float(), y
        self.at = (self.at + len(z)) % len(self.keys)


def bank_loss(z, y, bank, tau=0.1):
    logits = (z.float() @ bank.keys.t()) / tau
    logits = logits.masked_fill(bank.labels < 0, float("-inf"))
    pos = bank.labels[None] == y[:, None]
    ok = pos.any(1)
    if not ok.any():
        return None
    num = torch.logsumexp(logits[ok].masked_fill(~pos[ok], float("-inf")), 1)
    return (torch.logsumexp(logits[ok], 1) - num).mean()


net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 24))
bank = Bank(512, 24)
MODULES = [net, bank]
watch(*MODULES)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
proto = torch.randn(12, 20, generator=gen)
for it in range(80):
    y = torch.randint(0, 12, (32,), generator=gen)
    x = proto[y] + 0.8 * torch.randn(32, 20, generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        z = F.normalize(net(x).float(), dim=1)
        loss = bank_loss(z, y, bank)
    if loss is not None:
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    bank.push(z.detach(), y)
    if it % 10 == 9:
        print(it + 1, f"{loss.item():.4f} filled {(bank.labels >= 0).sum().item()}")
