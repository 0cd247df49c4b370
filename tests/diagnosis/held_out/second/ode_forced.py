"""Grey-box neural ODE: learned field plus a known periodic force, fixed-step Euler, weights in bfloat16 with fp32 masters."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Field(nn.Module):
    def __init__(self, dim=2, width=48):
        super().__init__()
        self.a = nn.Linear(dim, width)
        self.b = nn.Linear(width, dim)

    def forward(self, t, z):
        force = torch.stack([torch.zeros_like(t), 5.0 * torch.cos(6.28 * t)])
        return self.b(torch.tanh(self.a(z))) + force


def odeint(field, z0, t0, t1, n_steps, dtype):
    dt = torch.tensor((t1 - t0) / n_steps, dtype=dtype)
    t = torch.tensor(t0, dtype=dtype)
    z = z0
    for _ in range(n_steps):
        z = z + (field(t, z.to(dtype)) * dt).float()
        t = t + dt  # CAUSE
    return z


def truth(z0, n=128):
    z, t, h = z0.clone(), 0.0, 1.0 / n
    for _ in range(n):
        drive = 5.0 * torch.cos(torch.tensor(6.28 * t))
        z = z + h * torch.stack([z[:, 1], -z[:, 0] + drive], -1)
        t += h
    return z


def main(steps=40, dtype=torch.bfloat16):
    torch.set_num_threads(1)
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(6)
    live = Field().to(dtype)
    master = [p.detach().float().clone().requires_grad_() for p in live.parameters()]
    MODULES.append(live)
    watch(*MODULES)
    opt = torch.optim.Adam(master, lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for it in range(1, steps + 1):
        z0 = torch.randn(32, 2, generator=gen)
        pred = odeint(live, z0, 0.0, 1.0, 512, dtype)
        loss = (pred - truth(z0)).pow(2).mean()
        live.zero_grad()
        loss.backward()
        for m, p in zip(master, live.parameters()):
            m.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        opt.step()
        sched.step()
        with torch.no_grad():
            for m, p in zip(master, live.parameters()):
                p.copy_(m)
        if it % 5 == 0:
            print(it, f"{loss.item():.5f}")


MODULES = []
main()
