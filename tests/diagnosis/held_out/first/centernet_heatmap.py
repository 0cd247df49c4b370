import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(42)
torch.set_num_threads(1)


def _sigmoid(x):
    return torch.clamp(x.sigmoid(), min=1e-4, max=1 - 1e-4)  # CAUSE


def neg_loss(pred, gt):
    pos = gt.eq(1).to(pred.dtype)
    neg = 1 - pos
    neg_w = (1 - gt).pow(4)
    pos_l = torch.log(pred) * (1 - pred) ** 2 * pos
    neg_l = torch.log(1 - pred) * pred ** 2 * neg_w * neg
    n = pos.sum()
    return -(pos_l.sum() + neg_l.sum()) / n if n > 0 else -neg_l.sum()


class Backbone(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, stride=2, padding=1), nn.BatchNorm2d(c), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())

    def forward(self, x):
        return self.stem(x)


class CenterHead(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.hm = nn.Sequential(nn.Conv2d(c, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 1))
        self.wh = nn.Sequential(nn.Conv2d(c, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 2, 1))
        self.hm[-1].bias.data.fill_(-2.19)

    def forward(self, f):
        return self.hm(f), self.wh(f)


def scene(gen, b=6, size=32, stride=2):
    img = 0.1 * torch.randn(b, 3, size, size, generator=gen)
    s = size // stride
    hm, wh = torch.zeros(b, 1, s, s), torch.zeros(b, 2, s, s)
    yy, xx = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
    for i in range(b):
        for _ in range(2):
            cy, cx = torch.randint(3, s - 3, (2,), generator=gen).tolist()
            r = int(torch.randint(1, 3, (1,), generator=gen))
            img[i, :, (cy - r) * 2:(cy + r) * 2 + 1, (cx - r) * 2:(cx + r) * 2 + 1] += 1.0 + 0.5 * r
            g = torch.exp(-((yy - cy) ** 2 + (xx - cx) ** 2).float() / (2 * (r / 1.5) ** 2))
            hm[i, 0] = torch.maximum(hm[i, 0], g)
            wh[i, :, cy, cx] = 2.0 * r
    return img, hm, wh


backbone, head = Backbone(), CenterHead()
MODULES = [backbone, head]
optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=8e-3)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
watch(*MODULES)

rng = torch.Generator().manual_seed(4)
for it in range(1, 111):
    img, hm, wh = scene(rng)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hm_logit, wh_pred = head(backbone(img))
        hm_loss = neg_loss(_sigmoid(hm_logit), hm)
        mask = (hm == 1).expand_as(wh)
        size_loss = F.l1_loss(wh_pred[mask], wh[mask])
        total = hm_loss + 0.1 * size_loss
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    warm.step()
    if it % 10 == 0:
        print(f"iter {it:03d} hm {hm_loss.item():.4f} wh {size_loss.item():.4f}")
