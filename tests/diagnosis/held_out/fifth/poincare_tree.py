import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


def mobius_add(x, y):
    xy = (x * y).sum(-1, keepdim=True)
    x2 = x.pow(2).sum(-1, keepdim=True)
    y2 = y.pow(2).sum(-1, keepdim=True)
    num = (1 + 2 * xy + y2) * x + (1 - x2) * y
    den = 1 + 2 * xy + x2 * y2
    return num / den.clamp_min(1e-3)


def artanh(x):
    x = x.clamp(-1 + 1e-5, 1 - 1e-5)  # CAUSE
    return 0.5 * (torch.log1p(x) - torch.log1p(-x))


def expmap0(u):
    norm = u.norm(dim=-1, keepdim=True).clamp_min(1e-3)
    return torch.tanh(norm) * u / norm


def poincare_dist(x, y):
    diff = mobius_add(-x, y)
    return 2 * artanh(diff.norm(dim=-1))


class TreeEncoder(nn.Module):
    def __init__(self, n_feat=20, hidden=40, dim=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_feat, hidden), nn.Tanh(), nn.Linear(hidden, dim))
        self.temp = nn.Parameter(torch.tensor(1.0))

    def forward(self, feat):
        return expmap0(self.net(feat) * self.temp)


def tree_batch(gen, it, n=64):
    depth = torch.randint(1, 5, (n,), generator=gen)
    a = torch.randn(n, 20, generator=gen)
    b = a + 0.4 * torch.randn(n, 20, generator=gen)
    if it in (13, 14, 29, 41, 55):          # deep leaves of the taxonomy
        a[:8] = a[:8] * 40
        b[:8] = -a[:8]
        depth[:8] = 12
    return a, b, depth.float() * 0.5


def train():
    torch.manual_seed(3)
    gen = torch.Generator().manual_seed(21)
    enc = TreeEncoder()
    global MODULES
    MODULES = [enc]
    watch(*MODULES)
    opt = torch.optim.Adam(enc.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000)
    for it in range(64):
        a, b, target = tree_batch(gen, it)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            d = poincare_dist(enc(a), enc(b))
            loss = nn.functional.smooth_l1_loss(d.float(), target)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return loss


MODULES = []
if __name__ == "__main__":
    print("final", float(train()))
