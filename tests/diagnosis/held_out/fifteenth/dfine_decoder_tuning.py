"""Fine-tuning the decoder of a real-time detection transformer on a new set of scenes."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(199)
DIM, QUERIES, CLASSES = 48, 8, 3


def inverse_sigmoid(x, eps=1e-5):
    x = x.clip(min=0.0, max=1.0)
    return torch.log(x.clip(min=eps) / (1 - x).clip(min=eps))


def xyxy(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)


def generalized_box_iou(a, b):
    a, b = xyxy(a), xyxy(b)
    inter = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area = lambda z: (z[..., 2:] - z[..., :2]).prod(-1)
    union = area(a) + area(b) - inter
    hull = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).prod(-1)
    return inter / union - (hull - union) / hull


class TransformerDecoderLayer(nn.Module):
    def __init__(self, heads=4, ffn=96):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(DIM, heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(DIM, heads, batch_first=True)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.linear1, self.linear2 = nn.Linear(DIM, ffn), nn.Linear(ffn, DIM)

    def forward(self, target, memory, pos):
        q = target + pos
        target = self.norm1(target + self.self_attn(q, q, target, need_weights=False)[0])
        target = self.norm2(target + self.cross_attn(target + pos, memory, memory, need_weights=False)[0])
        target2 = self.linear2(F.relu(self.linear1(target)))  # CAUSE
        return self.norm3(target + target2)


class Decoder(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 24, 4, stride=4), nn.ReLU(), nn.Conv2d(24, DIM, 2, stride=2))
        self.queries, self.anchors = nn.Parameter(torch.randn(QUERIES, DIM)), nn.Parameter(torch.randn(QUERIES, 4))
        self.query_pos = nn.Linear(4, DIM)
        self.layers = nn.ModuleList(TransformerDecoderLayer() for _ in range(layers))
        self.bbox_head = nn.ModuleList(nn.Linear(DIM, 4) for _ in range(layers))
        self.score_head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        target = self.queries.expand(len(images), -1, -1)
        ref = torch.sigmoid(self.anchors).expand(len(images), -1, -1)
        for layer, head in zip(self.layers, self.bbox_head):
            target = layer(target, memory, self.query_pos(ref))
            ref = torch.sigmoid(head(target).float() + inverse_sigmoid(ref.detach()))
        return {"pred_logits": self.score_head(target), "pred_boxes": ref}

    def load_tuning_state(self):
        """Stands for weights after a long schedule on Objects365."""
        with torch.no_grad():
            for layer, gain in zip(self.layers, (4e3, 5.2e4, 6e3)):
                layer.linear2.weight.mul_(gain)
                layer.linear2.bias.mul_(gain)


def scenes(n, gen):
    boxes = torch.cat([0.3 + 0.4 * torch.rand(n, 2, 2, generator=gen), 0.15 + 0.25 * torch.rand(n, 2, 2, generator=gen)], -1)
    labels = torch.randint(0, CLASSES, (n, 2), generator=gen)
    images = 0.1 * torch.randn(n, 3, 32, 32, generator=gen)
    for i in range(n):
        for (x0, y0, x1, y1), c in zip((xyxy(boxes[i]) * 32).long().tolist(), labels[i].tolist()):
            images[i, c, y0:y1 + 1, x0:x1 + 1] += 1.0
    return images, boxes, labels


def criterion(out, boxes, labels):
    logits, pred = out["pred_logits"].float(), out["pred_boxes"].float()
    cost = (pred.unsqueeze(2) - boxes.unsqueeze(1)).abs().sum(-1) * 5
    cost = cost - torch.gather(logits.sigmoid(), 2, labels.unsqueeze(1).expand(-1, QUERIES, -1)) * 2
    first = cost[..., 0].argmin(1)
    second = cost[..., 1].scatter(1, first.unsqueeze(1), 1e4).argmin(1)
    index = torch.stack([first, second], 1)
    matched = torch.gather(pred, 1, index.unsqueeze(-1).expand(-1, -1, 4))
    target = torch.zeros_like(logits)
    target.scatter_(1, index.unsqueeze(-1).expand(-1, -1, CLASSES), F.one_hot(labels, CLASSES).float())
    p = logits.sigmoid().detach()
    weight = torch.where(target > 0, 1.0, 0.75 * p ** 2)
    vfl = F.binary_cross_entropy_with_logits(logits, target, weight=weight, reduction="sum") / boxes[..., 0].numel()
    return vfl + 5 * (matched - boxes).abs().sum(-1).mean() + 2 * (1 - generalized_box_iou(matched, boxes)).mean()


model = Decoder()
model.load_tuning_state()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 7, growth_interval=1000)
gen = torch.Generator().manual_seed(3)

for step in range(100):
    images, boxes, labels = scenes(6, gen)
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(images)
    if torch.isnan(outputs["pred_boxes"]).any() or torch.isinf(outputs["pred_boxes"]).any():
        print(f"step {step}: NaN in pred_boxes")
    loss = criterion(outputs, boxes, labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
