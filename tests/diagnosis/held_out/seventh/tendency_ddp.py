"""Forecast model trained on six-hour tendencies. This file is one rank of a data-parallel job: the process group is replaced
by LocalReducer, which treats the other ranks as replicas that saw the same kind of data."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)
gen = torch.Generator().manual_seed(17)

LAT, LON, VARS = 8, 16, 4
WORLD, MICRO = 2048, 2


class Periodic(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3)

    def forward(self, x):
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return self.conv(F.pad(x, (0, 0, 1, 1), mode="replicate"))


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.lift = Periodic(VARS, width)
        self.norm = nn.GroupNorm(4, width)
        self.mix = Periodic(width, width)
        self.drop = nn.Conv2d(width, VARS, 1)
        nn.init.normal_(self.drop.weight, std=2e-4)
        nn.init.zeros_(self.drop.bias)

    def forward(self, x):
        h = F.gelu(self.norm(self.lift(x)))
        return self.drop(h + F.gelu(self.mix(h)))


class LocalReducer:
    def __init__(self, params, world):
        self.params, self.world = list(params), world

    def all_reduce(self):
        for p in self.params:
            bucket = p.grad.div(self.world).to(torch.float16)  # CAUSE
            p.grad.copy_(bucket.float().mul_(self.world))


def states(n):
    x = torch.randn(n, VARS, LAT, LON, generator=gen)
    x = (x + x.roll(1, -1) + x.roll(1, -2)) / 3 ** 0.5
    tend = 3e-3 * (x.roll(1, -1) - x.roll(-1, -1)) * torch.sigmoid(x[:, :1]) + 2e-3 * torch.sin(2 * x.roll(1, 1))
    return x, tend


model = Forecaster()
MODULES = [model]
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-12, weight_decay=0.0)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 8))
reducer = LocalReducer(model.parameters(), WORLD)
test_x, test_t = states(32)
watch(*MODULES)
for update in range(100):
    for _ in range(MICRO):
        x, t = states(8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), t)
        (loss / MICRO).backward()
    reducer.all_reduce()
    opt.step()
    warm.step()
    opt.zero_grad()
    if update % 20 == 19:
        with torch.no_grad():
            skill = 1 - F.mse_loss(model(test_x), test_t) / test_t.square().mean()
        print(f"update {update + 1} loss {loss.item():.3e} skill {skill.item():+.3f}")
