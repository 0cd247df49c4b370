import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(31)
gen = torch.Generator().manual_seed(310)


class Koopman(nn.Module):
    """Lift, advance linearly several times, project back."""

    def __init__(self, lift=32, horizon=5):
        super().__init__()
        self.phi = nn.Linear(3, lift)
        self.K = nn.Linear(lift, lift, bias=False)
        self.back = nn.Linear(lift, 3)
        self.horizon = horizon

    def forward(self, x):
        z = self.phi(x)
        preds = []
        for _ in range(self.horizon):
            z = self.K(z)
            preds.append(self.back(z))
        return torch.stack(preds, 1)


def lorenz(x, n, dt=0.01):
    traj = [x]
    for _ in range(n):
        a, b, c = traj[-1].unbind(-1)
        traj.append(traj[-1] + dt * torch.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c], -1))
    return torch.stack(traj, 1)


model = Koopman()
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, nesterov=True)  # CAUSE
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 30))
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(80):
    x0 = torch.randn(32, 3, generator=gen) * torch.tensor([8.0, 9.0, 7.0]) + torch.tensor([0.0, 0.0, 24.0])
    traj = lorenz(x0, 5) / 20
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(traj[:, 0])
        loss = (pred.float() - traj[:, 1:]).square().mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # CAUSE
    scaler.update()
    scheduler.step()
    if it % 8 == 0:
        print(it, loss.item(), scaler.get_scale())
