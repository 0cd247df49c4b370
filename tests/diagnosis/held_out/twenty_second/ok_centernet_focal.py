"""CenterNet-style key-point heat maps with the hand-written focal loss, fp16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(121)
SIZE, DOWN, CLASSES, BATCH, ITERS = 24, 2, 2, 6, 70
OUT = SIZE // DOWN


def _sigmoid(x):
    return torch.clamp(x.sigmoid_(), min=1e-4, max=1 - 1e-4)


def _neg_loss(pred, gt):
    """Modified focal loss, as in CornerNet."""
    pos_inds = gt.eq(1).float()
    neg_inds = gt.lt(1).float()
    neg_weights = torch.pow(1 - gt, 4)
    pos_loss = torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds
    neg_loss = torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds
    num_pos = pos_inds.sum()
    pos_loss, neg_loss = pos_loss.sum(), neg_loss.sum()
    if num_pos == 0:
        return -neg_loss
    return -(pos_loss + neg_loss) / num_pos


class RegL1Loss(nn.Module):
    def forward(self, output, mask, target):
        mask = mask[:, None].float()
        return F.l1_loss(output * mask, target * mask, reduction="sum") / (mask.sum() + 1e-4)


class DLASeg(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, stride=DOWN, padding=1), nn.BatchNorm2d(c), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, padding=1), nn.ReLU())
        self.hm, self.wh = nn.Conv2d(c, CLASSES, 1), nn.Conv2d(c, 2, 1)
        self.hm.bias.data.fill_(-2.19)

    def forward(self, x):
        x = self.base(x)
        return {"hm": self.hm(x), "wh": self.wh(x)}


def draw_gaussian(heatmap, cy, cx, sigma):
    grid = torch.arange(OUT).float()
    blob = torch.exp(-((grid[:, None] - cy) ** 2 + (grid[None] - cx) ** 2) / (2 * sigma ** 2))
    torch.maximum(heatmap, blob, out=heatmap)


def coco_batch(gen, n=BATCH):
    """Filled boxes and empty frames; now and then an image without any object."""
    image = 0.2 * torch.randn(n, 1, SIZE, SIZE, generator=gen)
    hm, wh, mask = torch.zeros(n, CLASSES, OUT, OUT), torch.zeros(n, 2, OUT, OUT), torch.zeros(n, OUT, OUT)
    for i in range(n):
        for _ in range(int(torch.randint(0, 3, (1,), generator=gen))):
            label = int(torch.randint(0, CLASSES, (1,), generator=gen))
            h, w = torch.randint(5, 10, (2,), generator=gen).tolist()
            y, x = int(torch.randint(0, SIZE - h, (1,), generator=gen)), int(torch.randint(0, SIZE - w, (1,), generator=gen))
            image[i, 0, y:y + h, x:x + w] = 1.5
            if label == 1:
                image[i, 0, y + 1:y + h - 1, x + 1:x + w - 1] = 0
            cy, cx = (y + h // 2) // DOWN, (x + w // 2) // DOWN
            draw_gaussian(hm[i, label], cy, cx, min(h, w) / 6)
            hm[i, label, cy, cx] = 1
            wh[i, 0, cy, cx], wh[i, 1, cy, cx], mask[i, cy, cx] = w / DOWN, h / DOWN, 1
    return image, hm, wh, mask


def run_epoch(model, optimizer, scaler, gen):
    crit_reg = RegL1Loss()
    for iter_id in range(ITERS):
        image, hm, wh, mask = coco_batch(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(image)
        output = {k: v.float() for k, v in output.items()}
        hm_loss = _neg_loss(_sigmoid(output["hm"]), hm)
        wh_loss = crit_reg(output["wh"], mask, wh)
        loss = hm_loss + 0.1 * wh_loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if (iter_id + 1) % 7 == 0:
            print(f"ctdet [{iter_id + 1}/{ITERS}] loss {loss.item():.4f} hm_loss {hm_loss.item():.4f} wh_loss {wh_loss.item():.4f} "
                  f"largest {output['hm'].max().item():.2f}")


model = DLASeg()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
run_epoch(model, optimizer, scaler, torch.Generator().manual_seed(317))
MODULES = (model,)
