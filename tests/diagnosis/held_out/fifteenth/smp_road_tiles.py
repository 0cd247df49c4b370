"""Road segmentation of aerial tiles with a small U-Net and a Dice loss, cropped first, whole tiles afterwards."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(463)


def soft_dice_score(output, target, smooth=0.0, eps=1e-7, dims=None):
    assert output.size() == target.size()
    if dims is not None:
        intersection = torch.sum(output * target, dim=dims)  # CAUSE
        cardinality = torch.sum(output + target, dim=dims)  # CAUSE
    else:
        intersection = torch.sum(output * target)
        cardinality = torch.sum(output + target)
    return (2.0 * intersection + smooth) / (cardinality + smooth).clamp_min(eps)


class DiceLoss(nn.Module):
    def __init__(self, from_logits=True, smooth=0.0, eps=1e-7):
        super().__init__()
        self.from_logits, self.smooth, self.eps = from_logits, smooth, eps

    def forward(self, y_pred, y_true):
        bs = y_true.size(0)
        if self.from_logits:
            y_pred = F.logsigmoid(y_pred).exp()
        y_true, y_pred = y_true.view(bs, 1, -1), y_pred.view(bs, 1, -1)
        scores = soft_dice_score(y_pred, y_true.type_as(y_pred), self.smooth, self.eps, dims=(0, 2))
        loss = 1.0 - scores
        mask = y_true.sum((0, 2)) > 0
        return (loss * mask.to(loss.dtype)).mean()


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class Unet(nn.Module):
    def __init__(self, ch=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, ch, 4, stride=4), nn.ReLU())
        self.enc, self.mid = block(ch, ch), block(ch, 2 * ch)
        self.dec, self.head = block(3 * ch, ch), nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        a = self.enc(self.stem(x))
        b = self.mid(F.max_pool2d(a, 2))
        y = self.head(self.dec(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))
        return F.interpolate(y, scale_factor=4, mode="bilinear", align_corners=False)


def tiles(n, size, gen):
    coarse = torch.randn(n, 1, size // 32, size // 32, generator=gen)
    mask = (F.interpolate(coarse, size=size, mode="bilinear") > 0.15).float()
    image = 0.4 * torch.randn(n, 3, size, size, generator=gen) + torch.tensor([0.5, -0.3, 0.2]).view(1, 3, 1, 1) * mask
    return image, mask


class Epoch:
    def __init__(self, model, loss, optimizer=None, scaler=None):
        self.model, self.loss, self.optimizer, self.scaler = model, loss, optimizer, scaler

    def run(self, steps, size, batch, gen):
        self.model.train(self.optimizer is not None)
        logs = []
        for _ in range(steps):
            x, y = tiles(batch, size, gen)
            logs.append(self.batch_update(x, y) if self.optimizer else self.evaluate(x, y))
        return sum(logs) / len(logs)

    def batch_update(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def evaluate(self, x, y):
        with torch.no_grad():
            prediction = self.model(x).sigmoid() > 0.5
            return ((prediction & y.bool()).sum() / (prediction | y.bool()).sum()).item()


def main():
    model, loss = Unet(), DiceLoss()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
    gen = torch.Generator().manual_seed(7)
    train_epoch, valid_epoch = Epoch(model, loss, optimizer, scaler), Epoch(model, loss)
    for epoch, (steps, size, batch) in enumerate([(16, 64, 4), (16, 64, 4), (16, 64, 4), (10, 256, 4)]):
        dice = train_epoch.run(steps, size, batch, gen)
        iou = valid_epoch.run(2, 64, 4, torch.Generator().manual_seed(1))
        print(f"epoch {epoch} size {size} dice_loss {dice:.4f} iou {iou:.3f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
