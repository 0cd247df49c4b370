"""Water masks of satellite tiles; unlabelled pixels are 255 and do not count."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
IGNORE = 255


class ConvBNAct(nn.Sequential):
    def __init__(self, cin, cout, stride=1):
        super().__init__(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class SemanticModel(nn.Module):
    def __init__(self, nc=1, width=8):
        super().__init__()
        self.down1, self.down2 = ConvBNAct(4, width, 2), ConvBNAct(width, 2 * width, 2)
        self.mid = ConvBNAct(2 * width, 2 * width)
        self.head = nn.Conv2d(3 * width, nc, 1)

    def forward(self, x):
        a = self.down1(x)
        b = F.interpolate(self.mid(self.down2(a)), scale_factor=2)
        return F.interpolate(self.head(torch.cat([a, b], 1)), scale_factor=2, mode="bilinear")


class SemanticSegmentationLoss:
    def __init__(self, nc=1, dice_weight=0.5):
        self.nc, self.dice_weight = nc, dice_weight

    def _ce_loss(self, preds, mask):
        valid = mask != IGNORE
        if not valid.any():
            return preds.sum() * 0  # CAUSE
        pred, target = preds.squeeze(1)[valid].float(), mask[valid].float()
        return F.binary_cross_entropy_with_logits(pred, target)

    def _dice_loss(self, preds, mask):
        valid = mask != IGNORE
        if not valid.any():
            return preds.sum() * 0  # CAUSE
        p, t = preds.squeeze(1)[valid].float().sigmoid(), mask[valid].float()
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    def __call__(self, preds, mask):
        return self._ce_loss(preds, mask) + self.dice_weight * self._dice_loss(preds, mask)


class Tiles:
    """Rivers on land; every few tiles the clouds hide some or all of the labels."""

    def __init__(self, n, size=48, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for i in range(n):
            xs = torch.arange(size).float()
            centre = size / 2 + size / 3 * torch.sin(xs / 14 + 6 * torch.rand(1, generator=g))
            width = 3 + 3 * torch.rand(1, generator=g)
            mask = ((xs.view(-1, 1) - centre).abs() < width).long()
            bands = torch.tensor([0.2, 0.3, 0.4, -0.8]).view(4, 1, 1) * mask
            image = bands + 0.15 * torch.randn(4, size, size, generator=g)
            if i % 3 == 0:
                mask[: size // 4] = IGNORE
            self.items.append((image, mask))

    def hide(self, index):
        image, mask = self.items[index]
        self.items[index] = (image, torch.full_like(mask, IGNORE))


class Trainer:
    def __init__(self, model, data, batch=8):
        self.model, self.data, self.batch = model, data, batch
        self.criterion = SemanticSegmentationLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=5e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)

    def batches(self):
        for start in range(0, len(self.data.items), self.batch):
            part = self.data.items[start:start + self.batch]
            yield torch.stack([i for i, _ in part]), torch.stack([m for _, m in part])

    def train(self):
        self.model.train()
        for step, (images, masks) in enumerate(self.batches()):
            with torch.autocast("cpu", dtype=torch.float16):
                preds = self.model(images)
                loss = self.criterion(preds, masks)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if step % 5 == 0 or not torch.isfinite(loss):
                print(f"{step:3d} loss {loss.item():.4f}")


tiles = Tiles(8 * 70)
for batch in (4, 41, 58):  # scenes that are wholly under cloud
    for i in range(8 * batch, 8 * batch + 8):
        tiles.hide(i)
net = SemanticModel()
watch(net)
Trainer(net, tiles).train()
