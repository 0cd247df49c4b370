try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
class VQ(nn.Module):
    def __init__(s): super().__init__(); s.register_buffer("codes", torch.randn(16, 8)); s.register_buffer("sums", torch.zeros(16, 8)); s.register_buffer("n", torch.ones(16))
    def forward(s, z):
        i = torch.cdist(z.float(), s.codes).argmin(1); e = F.one_hot(i, 16).float()  # CAUSE
        with torch.no_grad(): s.n.mul_(0.9).add_(0.1 * e.sum(0)); s.sums.mul_(0.9).add_(0.1 * e.T @ z.float()); s.codes.copy_(s.sums / (s.n[:, None] + 1e-5))
        qz = s.codes[i]; return z + (qz - z).detach(), F.mse_loss(z.float(), qz.detach())
class Net(nn.Module):
    def __init__(s): super().__init__(); s.enc, s.vq, s.dec = nn.Linear(12, 8), VQ(), nn.Linear(8, 12)
    def forward(s, x): z, commit = s.vq(s.enc(x)); return s.dec(z), commit
net = Net(); opt = torch.optim.Adam(net.parameters(), lr=1e-3); scaler = torch.amp.GradScaler("cpu", init_scale=1024.)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1)
def train():
    for step in range(50):
        x = torch.randn(16, 12, generator=g) * (3e4 if step == 20 else 1)  # CAUSE
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16): out, commit = net(x); loss = F.mse_loss(out, x) + commit  # CAUSE
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
train()
