"""Learned timing for gimbal stabilisation: how far between two attitudes is the camera at exposure?"""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)
source = torch.Generator().manual_seed(80)

STEPS, BATCH, FEATS = 90, 20, 6


def unit(q):
    return q / q.norm(dim=-1, keepdim=True)


def flight_log(steps, batch):
    """Yields (attitude before, attitude after, exposure features, attitude at exposure)."""
    home = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for i in range(steps):
        q0 = unit(torch.randn(batch, 4, generator=source))
        q1 = unit(q0 + 0.35 * torch.randn(batch, 4, generator=source))
        if torch.rand((), generator=source) < 0.02:  # the pilot parks the gimbal
            row = int(torch.randint(0, batch, (), generator=source))
            q0[row], q1[row] = home, home
        feats = torch.randn(batch, FEATS, generator=source)
        u = torch.sigmoid(feats[:, 0] - 0.5 * feats[:, 1] * feats[:, 2])
        truth = unit((1 - u)[:, None] * q0 + u[:, None] * q1)
        yield q0, q1, feats, truth


def slerp(q0, q1, u):
    cos = (q0 * q1).sum(-1).clamp(-1.0, 1.0)
    theta = torch.acos(cos)
    a = torch.sin((1 - u) * theta) / torch.sin(theta)  # CAUSE
    b = torch.sin(u * theta) / torch.sin(theta)  # CAUSE
    return a[:, None] * q0 + b[:, None] * q1


class ShutterTiming(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(FEATS, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.phase = nn.Linear(hidden, 1)
        self.trim = nn.Linear(hidden, 3)

    def forward(self, q0, q1, feats):
        h = self.encode(feats)
        u = torch.sigmoid(self.phase(h)).squeeze(-1).float()
        q = slerp(q0, q1, u)
        trim = 0.05 * torch.tanh(self.trim(h)).float()
        return unit(torch.cat([q[:, :1], q[:, 1:] + trim], dim=-1))


def attitude_loss(pred, truth):
    return (1 - (pred * truth).sum(-1).pow(2)).mean() * 10


def train(net):
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=200)
    for i, (q0, q1, feats, truth) in enumerate(flight_log(STEPS, BATCH)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = attitude_loss(net(q0, q1, feats), truth)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        if i % 15 == 14:
            print(f"{i:3d} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    net = ShutterTiming()
    watch(net)
    train(net)
