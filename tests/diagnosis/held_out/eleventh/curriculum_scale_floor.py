"""Trajectory forecasting with a growing horizon; the loss scale is kept above a floor."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(10)

MIN_SCALE = 2.0 ** 11
HORIZONS = [(0, 2), (25, 4), (50, 12)]


class StepModel(nn.Module):
    """Residual update of a planar state; rolled out for the whole horizon."""

    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, state, horizon):
        path = []
        for _ in range(horizon):
            state = state + self.net(state)
            path.append(state)
        return torch.stack(path, 1)


def pendulum_pair(n, horizon, generator, dt=0.35):
    q = 2.5 * torch.randn(n, 2, generator=generator)
    p = 1.5 * torch.randn(n, 2, generator=generator)
    path = []
    state0 = torch.cat([q, p], 1)
    for _ in range(horizon):
        for _ in range(5):
            force = -q.sin() - 0.6 * (q - q.flip(1))
            p = p + dt / 5 * force
            q = q + dt / 5 * p
        path.append(torch.cat([q, p], 1))
    return state0, torch.stack(path, 1)


def horizon_at(step):
    return [h for start, h in HORIZONS if step >= start][-1]


def keep_scale_up(scaler):
    """Tiny scales starve the first layers."""
    if scaler.get_scale() < MIN_SCALE:
        scaler.update(MIN_SCALE)  # CAUSE


def main():
    model = StepModel()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=1000)
    generator = torch.Generator().manual_seed(30)
    for step in range(95):
        horizon = horizon_at(step)
        start, path = pendulum_pair(96, horizon, generator)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(start, horizon)
            loss = F.mse_loss(predicted.float(), path, reduction="sum") / len(start)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        keep_scale_up(scaler)
        if step % 10 == 0 or not math.isfinite(norm):
            print(f"{step:3d} horizon {horizon:2d} loss {loss.item() / horizon:.3f} "
                  f"norm {norm.item():.2f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
