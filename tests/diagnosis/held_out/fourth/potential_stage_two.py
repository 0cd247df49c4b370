# Small invariant potential: per-atom energies from radial features, two-stage weighting of energy and force terms.
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)

CONF = dict(stage_two=34, max_steps=80, w_energy=(1.0, 1000.0), w_force=(100.0, 10.0), min_scale=256.0)


def radial(dist, n=12, cut=4.0):
    centers = torch.linspace(0.5, cut, n)
    env = 0.5 * (torch.cos(torch.pi * (dist / cut).clamp(max=1.0)) + 1.0)
    return torch.exp(-4.0 * (dist.unsqueeze(-1) - centers) ** 2) * env.unsqueeze(-1)


class Potential(nn.Module):
    def __init__(self, n_rbf=12, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_rbf, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.energy = nn.Linear(width, 1)
        self.force = nn.Linear(width, 3)

    def forward(self, feat):
        h = self.body(feat)
        return self.energy(h).float().squeeze(-1).mean(1), self.force(h).float()


class LossScale:
    def __init__(self, floor):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=floor, growth_interval=400)
        self.floor = floor

    def backward(self, loss):
        self.scaler.scale(loss).backward()  # CAUSE

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < self.floor:
            self.scaler.update(self.floor)  # CAUSE


def structures(g, n=16, atoms=8):
    xyz = 2.5 * torch.rand(n, atoms, 3, generator=g)
    dist = torch.cdist(xyz, xyz) + 5.0 * torch.eye(atoms)
    feat = radial(dist).sum(2)
    e = (1.0 / dist.clamp(min=0.7) - 0.4 * (dist < 2.0)).sum((1, 2)) / atoms
    f = torch.stack([feat[..., 0] - feat[..., 3], feat[..., 2] * 0.5, torch.sin(feat[..., 5])], dim=-1)
    return feat, e, f


gen = torch.Generator().manual_seed(55)
net = Potential()
MODULES = [net]
watch(*MODULES)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, amsgrad=True)
amp = LossScale(CONF["min_scale"])
for step in range(1, CONF["max_steps"] + 1):
    stage = int(step > CONF["stage_two"])
    if step == CONF["stage_two"] + 1:
        for group in optimizer.param_groups:
            group["lr"] = 5e-4
    feat, e_ref, f_ref = structures(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        e, f = net(feat)
    mse_e, mse_f = (e - e_ref).square().mean(), (f - f_ref).square().mean()
    loss = CONF["w_energy"][stage] * mse_e + CONF["w_force"][stage] * mse_f
    optimizer.zero_grad(set_to_none=True)
    amp.backward(loss)
    amp.step(optimizer)
    if step % 8 == 0:
        print(f"stage {stage + 1} step {step} E-rmse {mse_e.sqrt().item():.4f} F-rmse {mse_f.sqrt().item():.4f}")
