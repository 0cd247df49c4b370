"""Rotated boxes in aerial tiles: one-stage head with decoded boxes and a differentiable rotated IoU loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(888)
TILE, STRIDE, EPSILON = 640, 32, 1e-8


def box2corners(box):
    """(N, 5) boxes x, y, w, h, angle to (N, 4, 2) corners."""
    x, y, w, h, alpha = box.unbind(-1)
    x4 = torch.tensor([0.5, -0.5, -0.5, 0.5]) * w[:, None]
    y4 = torch.tensor([0.5, 0.5, -0.5, -0.5]) * h[:, None]
    sin, cos = torch.sin(alpha), torch.cos(alpha)
    rot_t = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2)
    rotated = torch.bmm(torch.stack((x4, y4), -1), rot_t)
    rotated = rotated + torch.stack((x, y), -1)[:, None].to(rotated.dtype)
    return rotated


def box_intersection(corners1, corners2):
    """Intersections of the 4 x 4 edges of each pair, (N, 16, 2), and which of them are real."""
    line1 = torch.cat((corners1, corners1.roll(-1, 1)), dim=2)[:, :, None]
    line2 = torch.cat((corners2, corners2.roll(-1, 1)), dim=2)[:, None]
    x1, y1, x2, y2 = line1.unbind(-1)
    x3, y3, x4, y4 = line2.unbind(-1)
    numerator = (x1 - x2) * (y3 - y4) - (y1 - y2) * (x3 - x4)  # CAUSE
    denominator_t = (x1 - x3) * (y3 - y4) - (y1 - y3) * (x3 - x4)  # CAUSE
    t = denominator_t / torch.where(numerator == 0, 1, numerator)
    denominator_u = (x1 - x2) * (y1 - y3) - (y1 - y2) * (x1 - x3)
    u = -denominator_u / torch.where(numerator == 0, 1, numerator)
    mask = (numerator != 0) & (t > 0) & (t < 1) & (u > 0) & (u < 1)
    t = denominator_t / (numerator + EPSILON)  # CAUSE
    points = torch.stack((x1 + t * (x2 - x1), y1 + t * (y2 - y1)), dim=-1)
    return (points * mask[..., None]).flatten(1, 2), mask.flatten(1, 2)


def corners_inside(corners1, corners2):
    a, ab, ad = corners2[:, :1], corners2[:, 1:2] - corners2[:, :1], corners2[:, 3:4] - corners2[:, :1]
    am = corners1 - a
    p_ab, p_ad = (ab * am).sum(-1) / (ab * ab).sum(-1), (ad * am).sum(-1) / (ad * ad).sum(-1)
    return (p_ab > -1e-6) & (p_ab < 1 + 1e-6) & (p_ad > -1e-6) & (p_ad < 1 + 1e-6)


def diff_iou_rotated_2d(box1, box2):
    c1, c2 = box2corners(box1), box2corners(box2)
    points, mask = box_intersection(c1, c2)
    vertices = torch.cat((c1, c2, points), dim=1)
    mask = torch.cat((corners_inside(c1, c2), corners_inside(c2, c1), mask), dim=1)
    with torch.no_grad():
        count = mask.sum(1, keepdim=True)
        centre = (vertices * mask[..., None]).sum(1, keepdim=True) / count.clamp(min=1)[..., None]
        angle = torch.atan2(*(vertices - centre).float().flip(-1).unbind(-1)).masked_fill(~mask, 9.0)
        order = angle.argsort(dim=1)
        order = torch.where(torch.arange(24)[None] < count, order, order[:, :1])
    polygon = vertices.gather(1, order[..., None].expand(-1, -1, 2)) - centre
    nxt = polygon.roll(-1, 1)
    overlap = (polygon[..., 0] * nxt[..., 1] - polygon[..., 1] * nxt[..., 0]).sum(1).abs() / 2
    area1, area2 = box1[:, 2] * box1[:, 3], box2[:, 2] * box2[:, 3]
    return overlap / (area1 + area2 - overlap)


def rotated_iou_loss(pred, target, eps=1e-6):
    return (1 - diff_iou_rotated_2d(pred, target).clamp(min=eps)).mean()


class RotatedHead(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU())
        self.cls, self.reg, self.ang = (nn.Conv2d(width, c, 3, padding=1) for c in (1, 4, 1))

    def forward(self, img):
        h = self.backbone(img)
        return self.cls(h).flatten(1), (F.softplus(self.reg(h)) * STRIDE * 2).flatten(2), self.ang(h).flatten(1)


def tiles(gen, n=6, grid=TILE // STRIDE):
    """Rendered at an eighth of the tile: ships of 60 to 240 pixels, and now and then a quay or a runway."""
    side = TILE // 8
    img, boxes = 0.2 * torch.randn(n, 3, side, side, generator=gen), torch.zeros(n, 5)
    yy, xx = torch.meshgrid(torch.arange(side) * 8.0 + 4, torch.arange(side) * 8.0 + 4, indexing="ij")
    for i in range(n):
        cx, cy = (torch.rand(2, generator=gen) * 320 + 160).tolist()
        w, h = (torch.rand(2, generator=gen) * 100 + 60).tolist()
        w = 480.0 if torch.rand((), generator=gen) < 0.01 else w + 80
        a = float(torch.rand((), generator=gen) - 0.5)
        dx, dy = xx - cx, yy - cy
        u, v = dx * torch.cos(torch.tensor(a)) + dy * torch.sin(torch.tensor(a)), dy * torch.cos(torch.tensor(a)) - dx * torch.sin(torch.tensor(a))
        img[i] += ((u.abs() < w / 2) & (v.abs() < h / 2)).float() * torch.tensor([1.0, 0.5, -0.5]).view(3, 1, 1)
        boxes[i] = torch.tensor([cx, cy, w, h, a])
    cell = (boxes[:, 1] // STRIDE).long() * grid + (boxes[:, 0] // STRIDE).long()
    return img, boxes, cell


model = RotatedHead()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
gen, grid = torch.Generator().manual_seed(889), TILE // STRIDE
priors = torch.stack(torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="xy"), -1).view(-1, 2) * STRIDE + STRIDE / 2

for step in range(80):
    img, gt, cell = tiles(gen)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        cls, dist, angle = model(img)
        rows = torch.arange(len(cell))
        left, top, right, bottom = dist[rows, :, cell].unbind(-1)
        a, centre = angle[rows, cell], priors[cell]
        off_x, off_y = (right - left) / 2, (bottom - top) / 2
        x = centre[:, 0] + off_x * torch.cos(a) - off_y * torch.sin(a)
        y = centre[:, 1] + off_x * torch.sin(a) + off_y * torch.cos(a)
        decoded = torch.stack((x, y, left + right, top + bottom, a), dim=-1)
        loss_cls = F.binary_cross_entropy_with_logits(cls.float(), F.one_hot(cell, grid * grid).float(), reduction="sum") / len(cell)
        loss_bbox = 2.0 * rotated_iou_loss(decoded, gt)
    scaler.scale(0.2 * loss_cls + loss_bbox).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        print(f"Epoch(train) [{step}/80] loss_cls: {loss_cls.item():.4f} loss_bbox: {loss_bbox.item():.4f} scale: {scaler.get_scale():g}")
