"""Anchor-free detector for parcels on a belt, frames of 3520 pixels; validation in batches of eight with NMS."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(51)
GRID, STRIDE, CLASSES = 16, 220.0, 3


class Detector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(),
                                  nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.SiLU())
        self.cls, self.box = nn.Conv2d(width, CLASSES, 1), nn.Conv2d(width, 4, 1)
        nn.init.constant_(self.cls.bias, -3.0)

    def forward(self, frames):
        h = self.stem(frames)
        cls = self.cls(h).flatten(2).transpose(1, 2)
        ltrb = F.softplus(self.box(h)).flatten(2).transpose(1, 2) * STRIDE
        centre = (torch.arange(GRID, dtype=ltrb.dtype) + 0.5) * STRIDE
        y, x = (c.flatten() for c in torch.meshgrid(centre, centre, indexing="ij"))
        boxes = torch.stack([x - ltrb[..., 0], y - ltrb[..., 1], x + ltrb[..., 2], y + ltrb[..., 3]], -1)
        return cls, boxes


def nms(boxes, scores, threshold):
    b, keep, left = boxes.float(), [], scores.argsort(descending=True)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    while len(left):
        i, rest = left[0], left[1:]
        keep.append(i)
        wh = (torch.minimum(b[i, 2:], b[rest, 2:]) - torch.maximum(b[i, :2], b[rest, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        suppressed = inter / (area[i] + area[rest] - inter) > threshold
        left = rest[~suppressed]
    return torch.stack(keep)


def batched_nms(boxes, scores, labels, threshold):
    max_coordinate = boxes.max()
    offsets = labels.to(boxes) * (max_coordinate + 1)  # CAUSE
    return nms(boxes + offsets[:, None], scores, threshold)  # CAUSE


def bbox_nms(cls, boxes, min_confidence=0.3, min_iou=0.5):
    """All pictures of the batch at once: every pair of picture and class is moved to a place of its own."""
    n = cls.size(0)
    score, label = cls.sigmoid().max(-1)
    batch_idx, cell = torch.where(score > min_confidence)
    if not len(batch_idx):
        return [torch.zeros(0, 5)] * n
    flat_boxes, flat_label, flat_score = boxes[batch_idx, cell], label[batch_idx, cell], score[batch_idx, cell]
    keep = batched_nms(flat_boxes, flat_score, batch_idx + flat_label * n, min_iou)
    found = torch.cat([flat_boxes[keep].float(), flat_label[keep, None].float()], 1)
    return [found[batch_idx[keep] == i] for i in range(n)]


def belt(gen, n):
    """Two or three parcels of 3 to 5 cells, one colour per class, not overlapping."""
    frames, parcels = 0.1 * torch.randn(n, 3, GRID, GRID, generator=gen), []
    for i in range(n):
        rows = []
        for slot in range(torch.randint(2, 4, (1,), generator=gen).item()):
            w, h = torch.randint(3, 6, (2,), generator=gen).tolist()
            x, y = slot * 5 + torch.randint(0, 6 - w, (1,), generator=gen).item(), torch.randint(0, GRID - h, (1,), generator=gen).item()
            c = torch.randint(0, CLASSES, (1,), generator=gen).item()
            frames[i, c, y:y + h, x:x + w] += 1.0
            rows.append([x * STRIDE, y * STRIDE, (x + w) * STRIDE, (y + h) * STRIDE, c])
        parcels.append(torch.tensor(rows))
    return frames, parcels


def loss_fn(cls, boxes, parcels):
    centre = (torch.arange(GRID) + 0.5) * STRIDE
    y, x = (c.flatten() for c in torch.meshgrid(centre, centre, indexing="ij"))
    target, box_loss, positives = torch.zeros_like(cls, dtype=torch.float32), 0.0, 0
    for i, rows in enumerate(parcels):
        for r in rows:
            inside = (x > r[0]) & (x < r[2]) & (y > r[1]) & (y < r[3])
            target[i, inside, int(r[4])] = 1.0
            box_loss = box_loss + F.smooth_l1_loss(boxes[i, inside].float() / STRIDE, r[:4].expand(int(inside.sum()), 4) / STRIDE, reduction="sum")
            positives += int(inside.sum())
    return F.binary_cross_entropy_with_logits(cls.float(), target, reduction="sum") / positives + box_loss / positives


@torch.no_grad()
def validate(model, batches=3):
    gen, found, true, hits = torch.Generator().manual_seed(53), 0, 0, 0
    for _ in range(batches):
        frames, parcels = belt(gen, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            cls, boxes = model(frames)
            detections = bbox_nms(cls, boxes)
        for det, rows in zip(detections, parcels):
            found, true = found + len(det), true + len(rows)
            hits += sum(int(((det[:, :4] - r[:4]).abs().max(1).values < STRIDE).any()) for r in rows if len(det))
    return found / true, hits / true


model = Detector()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
gen = torch.Generator().manual_seed(52)
for step in range(60):
    frames, parcels = belt(gen, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        cls, boxes = model(frames)
        loss = loss_fn(cls, boxes, parcels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 14:
        model.eval()
        per_parcel, recall = validate(model)
        model.train()
        print(f"step {step} loss {loss.item():.4f} detections per parcel {per_parcel:.2f} recall {recall:.2f}")
