# Distil a squashed-gaussian teacher policy into a small student (log-likelihood of teacher actions).
import math

import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)

OBS, ACT, HID = 9, 4, 64


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, HID), nn.SiLU(), nn.Linear(HID, HID), nn.SiLU(), nn.Linear(HID, o))


class TanhNormal:
    def __init__(self, mean, log_std):
        self.mean, self.log_std = mean, log_std.clamp(-4, 1)

    def log_prob(self, action):
        a = action.to(self.mean.dtype)
        raw = torch.atanh(a.clamp(-1.0 + 1e-5, 1.0 - 1e-5))  # CAUSE
        z = (raw - self.mean) / self.log_std.exp()
        ll = -0.5 * z ** 2 - self.log_std - 0.5 * math.log(2 * math.pi)
        jac = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return (ll - jac).sum(-1)


teacher = mlp(OBS, ACT).requires_grad_(False)
student = mlp(OBS, 2 * ACT)
MODULES = [student, teacher]


def collect(g, n, gain):
    obs = torch.randn(n, OBS, generator=g)
    u = gain * teacher(obs) + 0.3 * torch.randn(n, ACT, generator=g)
    return obs, torch.tanh(u)


def main():
    g = torch.Generator().manual_seed(1)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=500)
    watch(*MODULES)
    gain = 1.0
    for it in range(70):
        gain = min(gain * 1.06, 30.0)     # teacher gets sharper over its own training
        obs, act = collect(g, 32, gain)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            mean, log_std = student(obs).chunk(2, -1)
            nll = -TanhNormal(mean, log_std).log_prob(act)
        loss = nll.float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(student.parameters(), 10.0)
        scaler.step(opt)
        scaler.update()
        if it % 10 == 0:
            print(f"{it:3d} nll {loss.item():.3f} gain {gain:.2f}")


main()
