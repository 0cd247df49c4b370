"""Snow depth at automatic gauges; most sensors drop out now and then and report NaN."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(55)

DAYS, GAUGES, SENSORS = 88, 40, 7
NAN = float("nan")


def season(seed):
    r = torch.Generator().manual_seed(seed)
    height = torch.rand(GAUGES, generator=r) * 2
    for day in range(DAYS):
        cold = 0.5 + 0.5 * math.sin(day / 14) + 0.1 * torch.randn(GAUGES, generator=r)
        snow = (height * cold).clamp(min=0) + 0.03 * torch.randn(GAUGES, generator=r)
        mix = torch.stack([height, cold, height * cold, cold.square(), height - cold, snow * 0 + day / 50, -height], 1)
        readings = mix + 0.05 * torch.randn(GAUGES, SENSORS, generator=r)
        readings[torch.rand(GAUGES, SENSORS, generator=r) < 0.2] = NAN
        if day in (29, 30, 66):  # the logger was snowed in, nothing came through
            readings[:] = NAN
        depth = torch.where(torch.rand(GAUGES, generator=r) < 0.25, torch.tensor(NAN), snow)
        if day == 51:
            depth[:] = NAN
        yield day, readings, depth


class GaugeNet(nn.Module):
    def __init__(self, width=56):
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(SENSORS))
        self.net = nn.Sequential(nn.Linear(2 * SENSORS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.depth = nn.Linear(width, 1)
        self.spread = nn.Linear(width, 1)

    def forward(self, readings):
        seen = ~torch.isnan(readings)
        filled = torch.where(seen, torch.nan_to_num(readings), self.missing)
        h = self.net(torch.cat([filled, seen.float()], dim=1))
        return self.depth(h).squeeze(1).float(), self.spread(h).squeeze(1).float()


def masked_laplace(mu, raw, depth):
    known = ~torch.isnan(depth)
    scale = nn.functional.softplus(raw) + 0.05
    each = (mu - torch.where(known, depth, mu.detach())).abs() / scale + scale.log()
    return torch.where(known, each, torch.zeros_like(each)).sum() / known.sum().clamp(min=1)


class Season:
    def __init__(self):
        self.net = GaugeNet()
        watch(self.net)
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=30)

    def day(self, readings, depth):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = masked_laplace(*self.net(readings), depth)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), int(torch.isnan(readings).sum())


if __name__ == "__main__":
    s = Season()
    for day, readings, depth in season(seed=501):
        loss, gaps = s.day(readings, depth)
        if day % 11 == 10 or day in (29, 51):
            print(f"day {day:2d} loss {loss:.4f} gaps {gaps} of {readings.numel()} scale {s.scaler.get_scale():g}")
