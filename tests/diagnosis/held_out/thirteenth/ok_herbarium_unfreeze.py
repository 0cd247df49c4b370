"""Leaf scans: a pretrained trunk is frozen at first, then thawed from the top, one stage at a time, with smaller rates."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(27)

GENERA, SIDE = 6, 16
THAW = {30: "stage3", 50: "stage2", 70: "stage1"}


def leaves(gen, size, shift=0.0):
    """Outlines r(angle) = 1 + a cos(k angle), drawn as soft masks with a vein; the genus sets k and a."""
    genus = torch.randint(GENERA, (size,), generator=gen)
    yy, xx = torch.meshgrid(torch.linspace(-1.5, 1.5, SIDE), torch.linspace(-1.5, 1.5, SIDE), indexing="ij")
    turn = (torch.rand(size, 1, 1, generator=gen) - 0.5) * 1.0
    angle = torch.atan2(yy, xx)[None] + turn
    k = (2 + genus % 3).view(-1, 1, 1).float()
    a = (0.15 + 0.25 * (genus // 3)).view(-1, 1, 1)
    radius = (xx.square() + yy.square()).sqrt()[None]
    mask = torch.sigmoid(8 * (1 + a * torch.cos(k * angle) - radius))
    image = torch.stack([mask, mask * (0.6 + shift), mask * torch.cos(3 * angle)], 1)
    return image + 0.1 * torch.randn(image.shape, generator=gen), genus


class Stage(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1, self.stage2, self.stage3 = Stage(3, 12), Stage(12, 24), Stage(24, 48)

    def forward(self, x):
        return self.stage3(self.stage2(self.stage1(x))).mean((2, 3))


class Frozen:
    """Stages without gradient also keep their batch statistics."""

    def __init__(self, trunk):
        self.trunk = trunk
        trunk.requires_grad_(False)

    def thaw(self, name, optimizer, lr):
        stage = getattr(self.trunk, name)
        stage.requires_grad_(True)
        optimizer.add_param_group({"params": list(stage.parameters()), "lr": lr})

    def train_mode(self):
        self.trunk.eval()
        for stage in self.trunk.children():
            if next(stage.parameters()).requires_grad:
                stage.train()


gen = torch.Generator().manual_seed(4)
trunk, head = Trunk(), nn.Linear(48, GENERA)
warm = torch.optim.Adam(list(trunk.parameters()) + list(head.parameters()), lr=5e-3)
for _ in range(40):  # stands in for the download of pretrained weights
    image, genus = leaves(gen, 32)
    warm.zero_grad()
    F.cross_entropy(head(trunk(image)), genus // 3).backward()
    warm.step()

head.reset_parameters()
watch(trunk, head)
frozen = Frozen(trunk)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=25)

for step in range(95):
    if step in THAW:
        frozen.thaw(THAW[step], optimizer, lr=0.05 * 0.6 ** list(THAW).index(step))
    frozen.train_mode()
    image, genus = leaves(gen, 32, shift=0.2)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(head(trunk(image)), genus)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p for p in [*trunk.parameters(), *head.parameters()] if p.grad is not None], 2.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        live = sum(p.requires_grad for p in trunk.parameters())
        print(f"{step:3d} loss {loss.item():.4f} trainable in the trunk {live} scale {scaler.get_scale():g}")
