"""Query-based segmentation: class and mask per query, bipartite matching in every step."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(7)

SIZE, QUERIES, CLASSES = 256, 6, 4
rng = torch.Generator().manual_seed(21)


def pair_wise_sigmoid_cross_entropy_loss(inputs, labels):
    """Cost of every pair of predicted and true mask, (queries, points) x (segments, points)."""
    height_and_width = inputs.shape[1]
    criterion = nn.BCEWithLogitsLoss(reduction="none")
    cross_entropy_loss_pos = criterion(inputs, torch.ones_like(inputs))
    cross_entropy_loss_neg = criterion(inputs, torch.zeros_like(inputs))
    loss_pos = torch.matmul(cross_entropy_loss_pos, labels.T)  # CAUSE
    loss_neg = torch.matmul(cross_entropy_loss_neg, (1 - labels).T)  # CAUSE
    loss = loss_pos + loss_neg
    return loss / height_and_width


def pair_wise_dice_loss(inputs, labels):
    inputs = inputs.sigmoid().float()
    numerator = 2 * (inputs @ labels.T).float() / inputs.shape[1]
    denominator = inputs.mean(-1)[:, None] + labels.mean(-1)[None, :]
    return 1 - (numerator + 1e-4) / (denominator + 1e-4)


def linear_sum_assignment(cost):
    rows, cols = cost.shape
    cost, best, chosen = cost.tolist(), float("inf"), None
    for pick in itertools.permutations(range(rows), cols):
        total = sum(cost[r][c] for c, r in enumerate(pick))
        if total < best:
            best, chosen = total, pick
    if chosen is None:
        raise ValueError("cost matrix is infeasible")
    return torch.tensor(chosen)


class HungarianMatcher:
    @torch.no_grad()
    def __call__(self, class_logits, mask_logits, classes, masks):
        picks = []
        for logits, pred, c, m in zip(class_logits, mask_logits, classes, masks):
            cost_class = -logits.softmax(-1)[:, c]
            pred, m = pred.flatten(1), m.flatten(1)
            cost = 5.0 * pair_wise_sigmoid_cross_entropy_loss(pred, m) + 2.0 * cost_class + 5.0 * pair_wise_dice_loss(pred, m)
            picks.append(linear_sum_assignment(cost.float()))
        return picks


class QuerySegmenter(nn.Module):
    def __init__(self, d=32, c=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, stride=8), nn.GELU(), nn.Conv2d(16, d, 3, padding=1), nn.GELU())
        self.pixel = nn.Conv2d(d, c, 1)
        self.queries = nn.Parameter(torch.randn(QUERIES, d))
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.class_head, self.mask_embed = nn.Linear(d, CLASSES + 1), nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, c))

    def forward(self, x):
        f = self.stem(x)
        memory = F.avg_pool2d(f, 4).flatten(2).transpose(1, 2)
        q = self.queries.expand(len(x), -1, -1)
        q = self.norm(q + self.attn(q, memory, memory, need_weights=False)[0])
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_embed(q), self.pixel(f))
        return self.class_head(q), F.interpolate(masks, size=(SIZE, SIZE), mode="bilinear")


def scene(index):
    """Rectangles of one to three classes; in part of the data the plain wall (class 3) is labelled too."""
    image, classes, masks = 0.1 * torch.randn(3, SIZE, SIZE, generator=rng), [], []
    kinds = [3] if index % 9 == 8 else torch.randperm(3, generator=rng)[: 1 + index % 3].tolist()
    for kind in kinds:
        edge = 246 if kind == 3 else int(torch.randint(48, 112, (1,), generator=rng))
        top, left = torch.randint(0, SIZE - edge, (2,), generator=rng).tolist()
        mask = torch.zeros(SIZE, SIZE)
        mask[top:top + edge, left:left + edge] = 1
        image += mask * torch.tensor([[1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5], [0.2, 0.2, 0.2]])[kind].view(3, 1, 1)
        classes.append(kind)
        masks.append(mask)
    return image, torch.tensor(classes), torch.stack(masks)


def criterion(class_logits, mask_logits, classes, masks, matcher):
    picks = matcher(class_logits, mask_logits, classes, masks)
    target = torch.full(class_logits.shape[:2], CLASSES)
    mask_loss = 0.0
    for i, (rows, c, m) in enumerate(zip(picks, classes, masks)):
        target[i, rows] = c
        pred = mask_logits[i, rows].float()
        p = pred.sigmoid()
        dice = 1 - (2 * (p * m).sum((1, 2)) + 1) / (p.sum((1, 2)) + m.sum((1, 2)) + 1)
        mask_loss = mask_loss + 5.0 * F.binary_cross_entropy_with_logits(pred, m) + 5.0 * dice.mean()
    return 2.0 * F.cross_entropy(class_logits.flatten(0, 1).float(), target.flatten()) + mask_loss / len(picks)


model = QuerySegmenter()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
matcher = HungarianMatcher()
for step in range(60):
    batch = [scene(i if step >= 30 else i % 8) for i in range(3 * step, 3 * step + 3)]
    images, classes, masks = torch.stack([b[0] for b in batch]), [b[1] for b in batch], [b[2] for b in batch]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        class_logits, mask_logits = model(images)
        try:
            loss = criterion(class_logits, mask_logits, classes, masks, matcher)
        except ValueError as error:
            print(f"step {step}: {error}, stopping")
            break
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.3f}")
