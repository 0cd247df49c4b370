import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)


def fused_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def fused_gelu_back(g, x):
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    ff = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)  # CAUSE
    return ff * g


class FusedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return fused_gelu(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return fused_gelu_back(g, x)


class CellBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        return self.norm(x + self.fc2(FusedGelu.apply(self.fc1(x))))


class ShowerRegressor(nn.Module):
    """energy of a shower from the cells of a sampling calorimeter (GeV per cell)"""

    def __init__(self, cells=32, d=48):
        super().__init__()
        self.embed = nn.Linear(cells, d)
        self.blocks = nn.ModuleList([CellBlock(d) for _ in range(2)])
        self.out = nn.Linear(d, 1)

    def forward(self, e):
        h = self.embed(e)
        for b in self.blocks:
            h = b(h)
        return self.out(h).squeeze(-1)


gen = torch.Generator().manual_seed(5)


def showers(n, hard=False):
    total = 1.0 + 9.0 * torch.rand(n, generator=gen)
    prof = torch.rand(n, 32, generator=gen) ** 3
    if hard:
        total[0] = 20000.0
    cells = total[:, None] * prof / prof.sum(1, keepdim=True)
    return cells, torch.log(total)


net = ShowerRegressor()
MODULES = [net]
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
watch(*MODULES)

for it in range(60):
    cells, target = showers(64, hard=it in (22, 41))
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(cells)
        loss = nn.functional.smooth_l1_loss(pred.float(), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if it % 20 == 0:
        print(it, round(loss.item(), 4))
