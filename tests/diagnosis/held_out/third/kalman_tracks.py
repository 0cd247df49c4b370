import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)
G = torch.Generator().manual_seed(8)
DT = 0.1


class DeepKalman(nn.Module):
    """Constant-velocity filter whose noise levels come from a network."""

    def __init__(self):
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        Fm = torch.eye(4)
        Fm[0, 2] = Fm[1, 3] = DT
        self.register_buffer("Fm", Fm)
        self.register_buffer("H", torch.eye(2, 4))

    def forward(self, obs, sensor, p0):
        n, T, _ = obs.shape
        x = torch.cat([obs[:, 0], torch.zeros(n, 2)], -1)
        P = torch.diag_embed(p0)
        nll = 0.0
        for t in range(1, T):
            q, r = torch.nn.functional.softplus(self.noise(sensor[:, t])).float().add(1e-3).unbind(-1)
            x = x @ self.Fm.T
            P = self.Fm @ P @ self.Fm.T  # CAUSE
            P = P.float() + q.view(-1, 1, 1) * torch.eye(4)
            S = P[:, :2, :2] + r.view(-1, 1, 1) * torch.eye(2)
            K = P[:, :, :2] @ torch.linalg.inv(S)
            e = obs[:, t] - x[:, :2].float()
            nll = nll + 0.5 * (torch.logdet(S) + (e.unsqueeze(1) @ torch.linalg.inv(S) @ e.unsqueeze(2)).squeeze()).float()
            x = x.float() + (K @ e.unsqueeze(-1)).squeeze(-1).float()
            P = P - (K @ P[:, :2, :]).float()
        return nll.mean() / (T - 1)


def tracks(n, T=8):
    v = torch.randn(n, 1, 2, generator=G)
    pos = torch.randn(n, 1, 2, generator=G) + v * DT * torch.arange(T).view(1, T, 1)
    level = 0.05 + 0.3 * torch.rand(n, T, 1, generator=G)
    obs = pos + level * torch.randn(n, T, 2, generator=G)
    sensor = torch.cat([level, level ** 2, torch.randn(n, T, 2, generator=G)], -1)
    return obs, sensor


def prior(n, unknown):
    p = torch.tensor([0.1, 0.1, 1.0, 1.0]).repeat(n, 1)
    p[:unknown, 2:] = 1e5             # diffuse velocity for newly born tracks
    return p


kf = DeepKalman()
MODULES = [kf]
opt = torch.optim.Adam(kf.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
watch(*MODULES)
for step in range(1, 51):
    obs, sensor = tracks(16)
    p0 = prior(16, unknown=2 if step % 12 == 0 else 0)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = kf(obs, sensor, p0)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(kf.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
