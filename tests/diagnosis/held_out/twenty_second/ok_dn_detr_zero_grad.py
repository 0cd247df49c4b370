"""DETR-like set prediction of boxes with denoising queries (DN-DETR), fp16 autocast and gradient clipping."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(18)
SIZE, PATCH, DIM, QUERIES, CLASSES, BATCH, ITERS = 16, 4, 32, 3, 2, 8, 80


class DNDETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_proj, self.pos = nn.Conv2d(1, DIM, PATCH, stride=PATCH), nn.Parameter(0.2 * torch.randn(1, (SIZE // PATCH) ** 2, DIM))
        self.encoder = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.refpoint_embed, self.label_enc = nn.Parameter(torch.rand(QUERIES, 4)), nn.Embedding(CLASSES + 1, DIM)
        self.box_enc = nn.Linear(4, DIM)
        self.decoder = nn.TransformerDecoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.class_embed = nn.Linear(DIM, CLASSES)
        self.bbox_embed = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 4))

    def forward(self, images, dn_labels, dn_boxes):
        memory = self.encoder(self.input_proj(images).flatten(2).transpose(1, 2) + self.pos)
        b, pad = len(images), dn_labels.size(1)
        labels = torch.cat((dn_labels, torch.full((b, QUERIES), CLASSES)), dim=1)
        boxes = torch.cat((dn_boxes, self.refpoint_embed.sigmoid().expand(b, -1, -1)), dim=1)
        attn_mask = torch.zeros(pad + QUERIES, pad + QUERIES, dtype=torch.bool)
        attn_mask[pad:, :pad] = attn_mask[:pad, pad:] = True
        hs = self.decoder(self.label_enc(labels) + self.box_enc(boxes), memory, tgt_mask=attn_mask)
        logits, delta = self.class_embed(hs).float(), self.bbox_embed(hs).float()
        coords = (delta + torch.logit(boxes.float(), eps=1e-3)).sigmoid()
        return logits[:, :pad], coords[:, :pad], logits[:, pad:], coords[:, pad:]


def hungarian(logits, boxes, labels, targets):
    """Best of all assignments of two objects to three queries."""
    rows = []
    for i in range(len(logits)):
        cost = 5 * torch.cdist(boxes[i], targets[i], p=1) - logits[i].sigmoid()[:, labels[i]]
        rows.append(min(itertools.permutations(range(QUERIES), 2), key=lambda q: float(cost[q[0], 0] + cost[q[1], 1])))
    return torch.tensor(rows)


def focal(logits, one_hot):
    prob, ce = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none")
    p_t = prob * one_hot + (1 - prob) * (1 - one_hot)
    return (ce * (1 - p_t) ** 2).sum() / (2 * BATCH)


def criterion(outputs, labels, targets):
    dn_logits, dn_boxes, logits, boxes = outputs
    index = hungarian(logits.detach(), boxes.detach(), labels, targets)
    one_hot = torch.zeros_like(logits)
    batch = torch.arange(BATCH)[:, None]
    one_hot[batch, index, labels] = 1
    return {"loss_ce": focal(logits, one_hot), "loss_bbox": F.l1_loss(boxes[batch, index], targets),
            "tgt_loss_ce": focal(dn_logits, F.one_hot(labels, CLASSES).float()), "tgt_loss_bbox": F.l1_loss(dn_boxes, targets)}


WEIGHTS = {"loss_ce": 1.0, "loss_bbox": 5.0, "tgt_loss_ce": 1.0, "tgt_loss_bbox": 5.0}


def coco(gen):
    """A bright and a dark rectangle on a noisy ground."""
    images, boxes = 0.1 * torch.randn(BATCH, 1, SIZE, SIZE, generator=gen), torch.zeros(BATCH, 2, 4)
    for i, k in itertools.product(range(BATCH), range(2)):
        h, w = torch.randint(3, 7, (2,), generator=gen).tolist()
        y, x = int(torch.randint(0, SIZE - h, (1,), generator=gen)), int(torch.randint(0, SIZE - w, (1,), generator=gen))
        images[i, 0, y:y + h, x:x + w] = 1.5 if k == 0 else -1.5
        boxes[i, k] = torch.tensor([x + w / 2, y + h / 2, w, h]) / SIZE
    return images, torch.arange(2).repeat(BATCH, 1), boxes


def train_one_epoch(model, optimizer, scaler, gen, max_norm=0.1):
    for it in range(ITERS):
        samples, labels, targets = coco(gen)
        noised = (targets + 0.05 * torch.randn(targets.shape, generator=gen)).clamp(0.01, 0.99)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(samples, labels, noised)
        loss_dict = criterion(outputs, labels, targets)
        losses = sum(loss_dict[k] * WEIGHTS[k] for k in loss_dict)
        optimizer.zero_grad()
        scaler.scale(losses).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        if (it + 1) % 10 == 0:
            print(f"Epoch: [0] [{it + 1}/{ITERS}] loss: {losses.item():.4f} " +
                  " ".join(f"{k}: {v.item():.4f}" for k, v in loss_dict.items()) + f" scale: {scaler.get_scale():g}")


model = DNDETR()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
train_one_epoch(model, optimizer, scaler, torch.Generator().manual_seed(42))
MODULES = (model,)
