"""Anchor-free detector for small objects in big empty frames, four micro-batches per update."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

GRID, PX = 8, 32

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [(nn.Conv2d(a, b, 3, s, 1), nn.GroupNorm(8, b), nn.Hardswish())
                  for a, b, s in ((1, 16, 1), (16, 32, 2), (32, 48, 2))]
        self.trunk = nn.Sequential(*sum(layers, ()))
        self.obj, self.box = nn.Conv2d(48, 1, 1), nn.Conv2d(48, 4, 1)
        nn.init.constant_(self.obj.bias, -4.0)
        self.text_tower = nn.Embedding(32, 16)      # used by the open-vocabulary head, not in this stage

    def forward(self, img):
        f = self.trunk(img)
        return self.obj(f).squeeze(1), F.softplus(self.box(f))

def frames(gen, n=4):
    img = 0.1 * torch.randn(n, 1, PX, PX, generator=gen)
    heat, ltrb = torch.zeros(n, GRID, GRID), torch.zeros(n, 4, GRID, GRID)
    many = torch.randint(0, 3, (n,), generator=gen) * int(torch.rand((), generator=gen) < 0.6)
    for i in range(n):
        for _ in range(int(many[i])):
            r, c = torch.randint(1, GRID - 1, (2,), generator=gen).tolist()
            h, w = torch.randint(2, 5, (2,), generator=gen).tolist()
            img[i, 0, 4 * r + 2 - h:4 * r + 2 + h, 4 * c + 2 - w:4 * c + 2 + w] += 1.0
            heat[i, r, c], ltrb[i, :, r, c] = 1, torch.tensor([w, h, w, h]).float() / 4
    return img, heat, ltrb

def focal(logit, target):
    ce = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    return ((torch.sigmoid(logit) - target).square() * ce).sum()

def iou_loss(pred, goal):
    area = lambda b: (b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3])
    inter = area(torch.minimum(pred, goal))
    return -(inter / (area(pred) + area(goal) - inter)).clamp(min=1e-6).log()

def detection_loss(net, img, heat, ltrb):
    with torch.autocast("cpu", dtype=torch.float16):
        obj, box = net(img)
    obj, box = obj.float(), box.float()
    hit = heat > 0
    n_pos = int(hit.sum())
    cls = focal(obj, heat) / max(n_pos, 1)
    pred, goal = box.permute(0, 2, 3, 1)[hit], ltrb.permute(0, 2, 3, 1)[hit]
    reg = iou_loss(pred, goal).mean() if n_pos else box.sum() * 0.0
    return cls, reg, n_pos

def fit(net, updates=40, micro=4):
    gen = torch.Generator().manual_seed(66)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=15)
    watch(*MODULES)
    for step in range(1, updates + 1):
        seen, total = 0, 0.0
        for _ in range(micro):
            cls, reg, n_pos = detection_loss(net, *frames(gen))
            seen += n_pos
            total += (cls + reg).item() / micro
            scaler.scale((cls + reg) / micro).backward()
        if seen == 0:
            opt.zero_grad(set_to_none=True)
            print(step, "nothing in sight, no update")
            continue
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 3.0)
        old = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() >= old:
            sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 8 == 0:
            print(step, f"loss {total:.3f} boxes {seen} scale {scaler.get_scale():g}")

torch.set_num_threads(1)
torch.manual_seed(27)
net = Detector()
MODULES = [net]
fit(net)
