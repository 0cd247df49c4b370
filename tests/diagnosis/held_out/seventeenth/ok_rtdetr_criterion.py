"""Set prediction of boxes in the style of RT-DETR: the forward pass is autocast, the criterion has it switched off."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(151)


class RTDETR(nn.Module):
    def __init__(self, d=48, queries=4, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, d, 3, 2, 1), nn.ReLU())
        self.position = nn.Parameter(0.1 * torch.randn(36, d))
        self.encoder = nn.TransformerEncoderLayer(d, 4, 96, 0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(queries, d))
        self.decoder = nn.TransformerDecoderLayer(d, 4, 96, 0.0, batch_first=True)
        self.score, self.bbox = nn.Linear(d, classes), nn.Linear(d, 4)

    def forward(self, samples):
        memory = self.backbone(samples).flatten(2).transpose(1, 2) + self.position
        memory = self.encoder(memory)
        h = self.decoder(self.query.expand(len(samples), -1, -1), memory)
        return {"pred_logits": self.score(h), "pred_boxes": self.bbox(h).sigmoid()}


def giou(a, b):
    """Boxes as cx, cy, w, h."""
    a, b = (torch.cat([x[..., :2] - x[..., 2:] / 2, x[..., :2] + x[..., 2:] / 2], -1) for x in (a, b))
    area = lambda x: (x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1])
    inter = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = area(a) + area(b) - inter
    return inter / union - (hull - union) / hull


class SetCriterion(nn.Module):
    weight_dict = {"loss_vfl": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}

    def match(self, logits, boxes, target):
        n = len(target["labels"])
        cost = -logits.sigmoid()[:, target["labels"]] + 5 * torch.cdist(boxes, target["boxes"], p=1)
        cost = cost - 2 * giou(boxes[:, None], target["boxes"][None])
        return list(min(itertools.permutations(range(len(boxes)), n), key=lambda p: sum(cost[q, i].item() for i, q in enumerate(p))))

    def forward(self, outputs, targets):
        logits, boxes = outputs["pred_logits"].float(), outputs["pred_boxes"].float()
        onehot, src, dst = torch.zeros_like(logits), [], []
        for i, target in enumerate(targets):
            with torch.no_grad():
                index = self.match(logits[i], boxes[i], target)
            onehot[i, index, target["labels"]] = 1
            src.append(boxes[i, index])
            dst.append(target["boxes"])
        src, dst = torch.cat(src), torch.cat(dst)
        weight = 0.75 * logits.detach().sigmoid() ** 2 * (1 - onehot) + onehot
        return {"loss_vfl": F.binary_cross_entropy_with_logits(logits, onehot, weight, reduction="sum") / len(dst),
                "loss_bbox": (src - dst).abs().sum(1).mean(), "loss_giou": (1 - giou(src, dst)).mean()}


def pictures(gen, n=8):
    """One or two rectangles; the class is the grey level."""
    samples, targets = 0.1 * torch.randn(n, 1, 24, 24, generator=gen), []
    for i in range(n):
        rows, labels = [], []
        for k in range(int(torch.randint(1, 3, (1,), generator=gen))):
            w, h = torch.randint(5, 10, (2,), generator=gen).tolist()
            x, y = 12 * k + int(torch.randint(0, 13 - w, (1,), generator=gen)), int(torch.randint(0, 25 - h, (1,), generator=gen))
            c = int(torch.randint(0, 3, (1,), generator=gen))
            samples[i, 0, y:y + h, x:x + w] += (-1.0, 1.0, 2.0)[c]
            rows.append([(x + w / 2) / 24, (y + h / 2) / 24, w / 24, h / 24])
            labels.append(c)
        targets.append({"boxes": torch.tensor(rows), "labels": torch.tensor(labels)})
    return samples, targets


def train_one_epoch(model, criterion, optimizer, scaler, gen, epoch, iterations=45):
    for i in range(iterations):
        samples, targets = pictures(gen)
        with torch.autocast(device_type="cpu", dtype=torch.float16, cache_enabled=True):
            outputs = model(samples)
        with torch.autocast(device_type="cpu", enabled=False):
            loss_dict = criterion(outputs, targets)
        loss = sum(loss_dict[k] * criterion.weight_dict[k] for k in loss_dict)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if i % 15 == 0:
            print(f"epoch {epoch} {i:2d} " + " ".join(f"{k} {v.item():.3f}" for k, v in loss_dict.items()) + f" outputs {outputs['pred_logits'].dtype}")


model = RTDETR()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
gen = torch.Generator().manual_seed(152)
for epoch in range(2):
    train_one_epoch(model, SetCriterion(), optimizer, scaler, gen, epoch)
