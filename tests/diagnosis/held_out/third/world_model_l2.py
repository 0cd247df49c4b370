import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(52)
OBS, ACT, LAT = 8, 2, 24


class LatentDynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBS, 64), nn.ELU(), nn.Linear(64, LAT))
        self.trans = nn.Sequential(nn.Linear(LAT + ACT, 64), nn.ELU(), nn.Linear(64, LAT))
        self.decoder = nn.Linear(LAT, OBS)
        self.reward = nn.Linear(LAT, 1)

    def imagine(self, obs, acts):
        z = self.encoder(obs)
        frames, rewards = [], []
        for a in acts.unbind(1):
            z = z + self.trans(torch.cat([z, a.to(z.dtype)], -1))
            frames.append(self.decoder(z))
            rewards.append(self.reward(z))
        return torch.stack(frames, 1), torch.cat(rewards, 1)


def simulate(g, n, horizon=4):
    A = torch.linalg.qr(torch.randn(OBS, OBS, generator=torch.Generator().manual_seed(1)))[0]
    B = torch.randn(ACT, OBS, generator=torch.Generator().manual_seed(2)) * 0.4
    x = torch.randn(n, OBS, generator=g)
    acts = torch.randn(n, horizon, ACT, generator=g)
    seq = [x]
    for a in acts.unbind(1):
        seq.append(torch.tanh(seq[-1] @ A + a @ B))
    seq = torch.stack(seq[1:], 1)
    return x, acts, seq, -(seq ** 2).mean(-1)


def add_l2(model, coef):
    """penalise matrices only, biases stay free"""
    for name, p in model.named_parameters():
        if p.grad is not None and p.ndim == 2:
            p.grad.add_(p.detach(), alpha=coef)  # CAUSE


wm = LatentDynamics()
MODULES = [wm]
g = torch.Generator().manual_seed(520)
opt = torch.optim.SGD(wm.parameters(), lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.StepLR(opt, 40, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
watch(*MODULES)
for it in range(1, 101):
    obs, acts, seq, rew = simulate(g, 64)
    with torch.autocast("cpu", dtype=torch.float16):
        frames, r = wm.imagine(obs, acts)
    loss = F.smooth_l1_loss(frames.float(), seq) + 0.5 * F.mse_loss(r.float(), rew)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    add_l2(wm, coef=0.02)
    scaler.step(opt)
    scaler.update()
    sched.step()
    if it % 25 == 0:
        norm = sum(p.pow(2).sum().item() for p in wm.parameters() if p.ndim == 2) ** 0.5
        print(it, round(loss.item(), 4), round(norm, 3))
