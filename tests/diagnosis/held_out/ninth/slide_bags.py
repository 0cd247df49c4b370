# Multi-instance learning on slide tiles: a slide is positive when at least one tile is.
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)


def make_slides(n, tiles, dim, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, tiles, dim, generator=gen)
    y = (torch.rand(n, generator=gen) < 0.02).float()
    sick = torch.randint(0, tiles, (n,), generator=gen)
    x[torch.arange(n), sick, :6] += 1.4 * y[:, None]
    return x, y


def noisy_or(tile_prob):
    return 1.0 - torch.prod(1.0 - tile_prob, dim=1)  # CAUSE


def slide_nll(prob, label):
    return -torch.where(label > 0, prob.log(), torch.log1p(-prob))


class TileNet(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(dim, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
        nn.init.constant_(self[-1].bias, -5.2)

    def forward(self, bag):
        return torch.sigmoid(super().forward(bag)).squeeze(-1)


slides, labels = make_slides(800, 32, 24, seed=77)
net = TileNet(24)
MODULES = [net]
optimizer = torch.optim.RMSprop(net.parameters(), lr=1.5e-3, alpha=0.95)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
pick = torch.Generator().manual_seed(8)
watch(*MODULES)

for step in range(1, 81):
    idx = torch.randint(0, len(slides), (24,), generator=pick)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tile_prob = net(slides[idx])
        slide_prob = noisy_or(tile_prob)
    loss = slide_nll(slide_prob.float(), labels[idx]).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    sched.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4), "mean tile p", f"{tile_prob.mean().item():.5f}")
