"""Goes on training a grid-encoded radiance field from the checkpoint of a long run."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(23)


class GridEncoding(nn.Module):
    """Two levels of trilinear features."""

    def __init__(self, features=4, resolutions=(8, 20)):
        super().__init__()
        self.grids = nn.ParameterList([nn.Parameter(1e-1 * torch.randn(1, features, r, r, r)) for r in resolutions])

    def forward(self, positions):
        where = (positions * 2 - 1).view(1, -1, 1, 1, 3)
        return torch.cat([F.grid_sample(g, where, align_corners=True).view(g.size(1), -1).T for g in self.grids], 1)


class TCNNInstantNGPField(nn.Module):
    def __init__(self, hidden=64, geo=15):
        super().__init__()
        self.position_encoding = GridEncoding()
        self.mlp_base = nn.Sequential(nn.Linear(8, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 1 + geo, bias=False))
        self.mlp_head = nn.Sequential(nn.Linear(geo + 3, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 3, bias=False))

    def get_density(self, positions):
        h = self.mlp_base(self.position_encoding(positions))  # CAUSE
        density_before_activation, base_mlp_out = h.split([1, h.size(-1) - 1], -1)
        return F.softplus(density_before_activation.float() - 1), base_mlp_out

    def forward(self, positions, directions):
        density, base = self.get_density(positions)
        rgb = torch.sigmoid(self.mlp_head(torch.cat([base, directions.to(base.dtype)], -1)).float())
        return density.squeeze(-1), rgb


def render(field, origins, directions, samples=24):
    t = torch.linspace(0.0, 1.0, samples).expand(len(origins), samples)
    points = origins[:, None] + t[..., None] * directions[:, None]
    density, rgb = field(points.reshape(-1, 3).clamp(0, 1), directions[:, None].expand_as(points).reshape(-1, 3))
    density, rgb = density.view(t.shape), rgb.view(*t.shape, 3)
    delta_density = density / samples
    alphas = 1 - torch.exp(-delta_density)
    transmittance = torch.exp(-(torch.cumsum(delta_density, -1) - delta_density))
    weights = alphas * transmittance
    return (weights[..., None] * rgb).sum(1) + (1 - weights.sum(1, keepdim=True))


def pixels(gen, n=96):
    """Rays across a unit cube with a coloured ball on white ground."""
    origins = torch.rand(n, 3, generator=gen)
    axis = torch.randint(0, 3, (n,), generator=gen)
    origins[torch.arange(n), axis] = 0.0
    directions = F.one_hot(axis, 3).float()
    centre = torch.full((3,), 0.5)
    along = ((centre - origins) * directions).sum(1, keepdim=True)
    nearest = origins + along * directions
    distance = (nearest - centre).norm(dim=1, keepdim=True)
    hit = (distance < 0.3).float()
    colour = torch.cat([nearest[:, :1], 0.2 + 0 * nearest[:, :1], 1 - nearest[:, 1:2]], 1)
    return origins, directions, hit * colour + (1 - hit)


def load_checkpoint(field):
    """Stands for step-000050000.ckpt: a few entries of the fine grid, seldom seen by a ray, have drifted far away."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        fine = field.position_encoding.grids[1]
        for _ in range(2):
            x, y, z = torch.randint(1, 19, (3,), generator=g).tolist()
            fine[0, :, z, y, x] = 3.0e4 * torch.sign(torch.randn(4, generator=g))
        field.mlp_base[2].weight.mul_(4.0)


field = TCNNInstantNGPField()
load_checkpoint(field)
watch(field)
optimizer = torch.optim.Adam([{"params": field.position_encoding.parameters(), "lr": 2e-2},
                              {"params": list(field.mlp_base.parameters()) + list(field.mlp_head.parameters()), "lr": 4e-3}],
                             eps=1e-15)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
gen = torch.Generator().manual_seed(6)
for step in range(80):
    origins, directions, target = pixels(gen)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        rgb = render(field, origins, directions)
        loss = F.mse_loss(rgb, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0 or not torch.isfinite(loss):
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
