"""Vehicle detection on aerial tiles; many tiles hold no object and give no box loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(88)
GRID, STRIDE = 8, 4

class Backbone(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, ch, 3, 2, 1), nn.Conv2d(ch, ch, 3, 2, 1)
        self.bn = nn.BatchNorm2d(ch)
        self.unused_fc = nn.Linear(ch, 10)

    def forward(self, x):
        return torch.relu(self.bn(self.c2(torch.relu(self.c1(x)))))

class Head(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.tower = nn.Conv2d(ch, 32, 3, padding=1)
        self.obj, self.box = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 4, 1)

    def forward(self, f):
        t = torch.relu(self.tower(f))
        return self.obj(t).squeeze(1), self.box(t).permute(0, 2, 3, 1)

def giou(a, b):
    lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1)
    return inter / area - (hull - area) / hull

class Detector:
    def __init__(self):
        self.backbone, self.head = Backbone(), Head()
        for p in self.backbone.c1.parameters():
            p.requires_grad = False
        params = [p for m in (self.backbone, self.head) for p in m.parameters() if p.requires_grad]
        self.opt = torch.optim.SGD(params, lr=1e-4, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=16)

    def losses(self, img, has, boxes):
        with torch.autocast("cpu", dtype=torch.float16):
            obj, raw = self.head(self.backbone(img))
        cls = F.binary_cross_entropy_with_logits(obj.float(), has.float(), reduction="sum")
        pos = has.nonzero(as_tuple=True)
        if pos[0].numel() == 0:
            return cls, None
        centre = torch.stack([pos[2], pos[1]], 1).float() * STRIDE + STRIDE / 2
        dist = F.softplus(raw[pos].float()) * STRIDE
        pred = torch.cat([centre - dist[:, :2], centre + dist[:, 2:]], 1)
        return cls, (1 - giou(pred, boxes[pos])).sum() * 12.0

det = Detector()
MODULES = [det.backbone, det.head]
watch(*MODULES)
g = torch.Generator().manual_seed(4)
for it in range(90):
    n = 6
    rate = 0.0 if it % 7 == 3 else 0.03
    has = torch.rand(n, GRID, GRID, generator=g) < rate
    half = 2 + 3 * torch.rand(n, GRID, GRID, 2, generator=g)
    yy, xx = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    ctr = torch.stack([xx, yy], -1).float() * STRIDE + STRIDE / 2
    boxes = torch.cat([ctr - half, ctr + half], -1)
    img = 0.2 * torch.randn(n, 3, GRID * STRIDE, GRID * STRIDE, generator=g)
    img += has.float().repeat_interleave(STRIDE, 1).repeat_interleave(STRIDE, 2).unsqueeze(1)
    if it % 20 == 13:
        continue                                   # corrupt archive, nothing to learn from
    cls, box = det.losses(img, has, boxes)
    loss = cls if box is None else cls + box
    det.opt.zero_grad()
    det.scaler.scale(loss).backward()
    det.scaler.step(det.opt)
    det.scaler.update()
    if it % 15 == 0:
        print(f"it {it} cls {cls.item():.2f} box {0.0 if box is None else box.item():.2f} scale {det.scaler.get_scale():g}")
