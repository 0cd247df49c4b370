import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)
BONES = [(0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (0, 6), (6, 7)]
PARENT = torch.tensor([b[0] for b in BONES])
CHILD = torch.tensor([b[1] for b in BONES])


def bone_dirs(joints):
    d = joints[:, CHILD] - joints[:, PARENT]
    return d / d.norm(dim=-1, keepdim=True)  # CAUSE


class PoseRegressor(nn.Module):
    def __init__(self, joints=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                                  nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(128, joints * 2)

    def forward(self, maps):
        return self.fc(self.stem(maps).flatten(1)).view(-1, 8, 2)


def render(joints, size=12):
    grid = torch.linspace(-1.5, 1.5, size)
    dx = grid.view(1, 1, 1, -1) - joints[..., 0, None, None]
    dy = grid.view(1, 1, -1, 1) - joints[..., 1, None, None]
    return torch.exp(-(dx ** 2 + dy ** 2) / 0.1)


def make_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    base = torch.tensor([[0, .9], [0, .4], [0, 0], [0, -.6], [.4, .2], [.8, .0], [-.4, .8], [-.8, .6]])
    j = base + 0.12 * torch.randn(n, 8, 2, generator=g)
    vis = torch.ones(n, 8)
    lost = torch.tensor([201, 350])           # annotator clicked wrist and elbow on one pixel
    j[lost, 5] = j[lost, 4]
    return j, vis


def epoch_loader(j, vis, bs=16):
    for i in range(0, len(j), bs):
        yield render(j[i:i + bs]), j[i:i + bs], vis[i:i + bs]


net = PoseRegressor()
MODULES = [net]
joints, vis = make_dataset(640, seed=23)
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
watch(*MODULES)
running = 0.0
for step, (maps, target, v) in enumerate(epoch_loader(joints, vis), 1):
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(maps)
    pred = pred.float()
    coord = ((pred - target).abs().sum(-1) * v).sum() / v.sum()
    align = 1 - (bone_dirs(pred) * bone_dirs(target)).sum(-1)
    loss = coord + 0.2 * align.mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, coord.item(), align.mean().item())
