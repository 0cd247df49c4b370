"""Photon counting: Poisson regression with sum reduction, bf16 autocast, no scaler."""
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(71)


class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.lograte = nn.Conv2d(16, 1, 1)
        self.unused_uncertainty = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        return self.lograte(self.conv(x)).float().clamp(-10, 14) + 8.0


@torch.no_grad()
def evaluate(net, x, y):
    net.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dev = nn.functional.poisson_nll_loss(net(x), y, log_input=True, full=True)
    net.train()
    return dev.item()


net = CountNet()
MODULES = [net]
watch(*MODULES)
gen = torch.Generator().manual_seed(710)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)


def field(n=8):
    z = torch.randn(n, 1, 12, 12, generator=gen)
    rate = torch.exp(8 + 0.7 * nn.functional.avg_pool2d(z, 3, 1, 1) * 3)
    return z, torch.poisson(rate, generator=gen)


held = field()
for it in range(60):
    z, counts = field()
    if it % 20 == 11:
        counts[0, 0, 0, 0] = 3.0e7           # cosmic ray
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.poisson_nll_loss(net(z), counts, log_input=True, reduction="sum")
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    if it % 15 == 0:
        print(it, loss.item(), "eval", evaluate(net, *held))
print("eval", evaluate(net, *held))
