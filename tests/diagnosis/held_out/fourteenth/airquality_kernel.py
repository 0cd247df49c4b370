"""PM2.5 at unseen places: a learned kernel smoother over fixed stations."""
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(70)


class Hour(NamedTuple):
    stations: torch.Tensor  # (S, 4) place, height, traffic
    values: torch.Tensor  # (S,)
    places: torch.Tensor  # (Q, 4)
    truth: torch.Tensor  # (Q,)


def field(where, wind):
    x, y = where[:, 0], where[:, 1]
    return torch.sin(1.5 * x + wind[0]) + torch.cos(1.2 * y + wind[1]) + 0.6 * where[:, 3] - 0.3 * where[:, 2]


def campaign(hours, seed):
    r = torch.Generator().manual_seed(seed)
    stations = torch.randn(36, 4, generator=r)
    for _ in range(hours):
        wind = torch.rand(2, generator=r) * 2
        places = 0.7 * torch.randn(28, 4, generator=r)
        if torch.rand((), generator=r) < 0.015:  # the measuring van drives out to the coast
            places[:3] += torch.tensor([6.5, 5.5, 0.0, 0.0])
        noise = 0.05 * torch.randn(64, generator=r)
        yield Hour(stations, field(stations, wind) + noise[:36], places, field(places, wind) + noise[36:])


class KernelSmoother(nn.Module):
    def __init__(self, dim=12, width=48):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, dim), nn.Tanh())
        self.skip = nn.Linear(4, dim)
        self.refine = nn.Sequential(nn.Linear(5, width), nn.SiLU(), nn.Linear(width, 1))

    def features(self, where):
        return self.embed(where) + self.skip(where)

    def forward(self, places, stations, values):
        q, k = self.features(places), self.features(stations)
        sq = q.square().sum(-1, keepdim=True) + k.square().sum(-1) - 2 * q @ k.t()
        weight = torch.exp(-sq.clamp(min=0))  # CAUSE
        smooth = (weight / weight.sum(-1, keepdim=True)) @ values  # CAUSE
        extra = self.refine(torch.cat([places, smooth.unsqueeze(-1).float()], dim=-1))
        return smooth + extra.squeeze(-1)


def main(hours=95):
    model = KernelSmoother()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=40)
    running = []
    for hour, h in enumerate(campaign(hours, seed=13)):
        with torch.autocast("cpu", dtype=torch.float16):
            estimate = model(h.places, h.stations, h.values)
        loss = F.smooth_l1_loss(estimate.float(), h.truth)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running.append(loss.item())
        if hour % 12 == 11:
            print(f"hour {hour:2d} mean loss {sum(running[-12:]) / 12:.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
