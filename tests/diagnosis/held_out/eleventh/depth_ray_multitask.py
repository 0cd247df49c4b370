"""Depth and ray directions from image patches; half precision for a V100, where bf16 is not available."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


@dataclass
class Settings:
    steps: int = 70
    views: int = 3
    size: int = 16
    width: int = 24
    lr: float = 2e-3
    depth_weight: float = 1.0
    ray_weight: float = 5e-6
    seed: int = 19


class Trunk(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(5, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return F.silu(self.norm(self.conv2(F.silu(self.conv1(x)))))


class GeometryNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.trunk = Trunk(width)
        self.depth_head = nn.Conv2d(width, 1, 1)
        self.ray_head = nn.Sequential(nn.Conv2d(width, width, 1), nn.SiLU(), nn.Conv2d(width, 3, 1))

    def forward(self, x):
        features = self.trunk(x)
        return self.depth_head(features), self.ray_head(features.detach())


def scene_batch(cfg, generator):
    """Tilted planes seen by a pin-hole camera with a random focal length."""
    axis = torch.linspace(-1, 1, cfg.size)
    v, u = torch.meshgrid(axis, axis, indexing="ij")
    focal = 0.8 + 0.8 * torch.rand(cfg.views, 1, 1, generator=generator)
    slope = 0.5 * torch.randn(cfg.views, 2, 1, 1, generator=generator)
    depth = 4.0 + 2.0 * (slope[:, 0] * u + slope[:, 1] * v)
    rays = torch.stack([u / focal, v / focal, torch.ones_like(u).expand(cfg.views, -1, -1)], 1)
    rays = F.normalize(rays, dim=1)
    shade = 1.0 / depth + 0.02 * torch.randn(depth.shape, generator=generator)
    maps = [shade, u.expand_as(shade), v.expand_as(shade), focal.expand_as(shade), torch.ones_like(shade)]
    return torch.stack(maps, 1), depth[:, None], rays


class MultiTaskLoss(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.depth_weight, self.ray_weight = cfg.depth_weight, cfg.ray_weight

    def forward(self, depth, rays, true_depth, true_rays):
        metric = F.mse_loss(depth.float(), true_depth)
        angular = (1 - F.cosine_similarity(rays.float(), true_rays, dim=1)).mean()
        return self.depth_weight * metric + self.ray_weight * angular, metric, angular


def train(cfg=Settings()):
    torch.manual_seed(cfg.seed)
    model, criterion = GeometryNet(cfg.width), MultiTaskLoss(cfg)
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    generator = torch.Generator().manual_seed(cfg.seed + 1)
    for step in range(cfg.steps):
        image, depth, rays = scene_batch(cfg, generator)
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            outputs = model(image)
            loss, metric, angular = criterion(*outputs, depth, rays)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # CAUSE
        optimizer.step()
        if step % 10 == 0 or step == cfg.steps - 1:
            print(f"{step:3d} depth {metric.item():.4f} rays {angular.item():.4f}")
    return model


if __name__ == "__main__":
    train()
