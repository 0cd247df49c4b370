"""Full-batch L-BFGS fit of a coordinate network to a height map, fp16 forward, constant loss scale."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(29)
LOSS_SCALE = 1024.0


class Sine(nn.Module):
    def __init__(self, omega):
        super().__init__()
        self.omega = omega

    def forward(self, x):
        return torch.sin(self.omega * x.float())


def height_map(n=14):
    axis = torch.linspace(-1, 1, n)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    ridge = torch.exp(-((x - 0.3 * torch.sin(3 * y)) / 0.25) ** 2)
    basin = -0.6 * torch.exp(-((x + 0.5) ** 2 + (y - 0.4) ** 2) / 0.1)
    lake = (x - 0.6) ** 2 + (y + 0.6) ** 2 < 0.06
    height = (ridge + basin).masked_fill(lake, float("nan"))
    return torch.stack([x, y], -1).reshape(-1, 2), height.reshape(-1)


def make_closure(net, optimizer, coords, height, log):
    land = ~height.isnan()
    target = torch.nan_to_num(height, nan=0.0)

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(coords).squeeze(-1)
        error = (out.float() - target).square()
        loss = (error * land).sum() / land.sum()
        if loss.requires_grad:
            (loss * LOSS_SCALE).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.grad /= LOSS_SCALE
        log.append(loss.item())
        return loss

    return closure


def main(outer=14):
    coords, height = height_map()
    net = nn.Sequential(nn.Linear(2, 32), Sine(4.0), nn.Linear(32, 32), Sine(1.5), nn.Linear(32, 1))
    watch(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=5, history_size=8, tolerance_grad=0.0,
                                  tolerance_change=0.0)
    log = []
    closure = make_closure(net, optimizer, coords, height, log)
    for step in range(outer):
        loss = optimizer.step(closure)
        missing = int(height.isnan().sum())
        print(f"{step:2d} loss {loss.item():.5f} evaluations {len(log)} best {min(log):.5f} masked {missing}")


if __name__ == "__main__":
    main()
