"""Lane segmentation: features are passed on recurrently from row to row and from column to column."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1)


class Config:
    img, fea_stride, chan, num_classes = 32, 4, 16, 4
    resa_iter, resa_alpha, resa_conv_stride = 5, 2.0, 9
    lr, momentum, total_iter, batch_size = 0.02, 0.9, 50, 4


class RESA(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.iter, self.alpha = cfg.resa_iter, cfg.resa_alpha
        size, k, chan = cfg.img // cfg.fea_stride, cfg.resa_conv_stride, cfg.chan
        for i in range(self.iter):
            step = size // 2 ** (self.iter - i)
            for way, kernel, pad in (("d", (1, k), (0, k // 2)), ("r", (k, 1), (k // 2, 0))):
                back = {"d": "u", "r": "l"}[way]
                setattr(self, "conv_" + way + str(i), nn.Conv2d(chan, chan, kernel, padding=pad, bias=False))
                setattr(self, "conv_" + back + str(i), nn.Conv2d(chan, chan, kernel, padding=pad, bias=False))
                setattr(self, "idx_" + way + str(i), (torch.arange(size) + step) % size)
                setattr(self, "idx_" + back + str(i), (torch.arange(size) - step) % size)

    def forward(self, x):
        x = x.clone()
        for direction in ["d", "u"]:
            for i in range(self.iter):
                conv, idx = getattr(self, "conv_" + direction + str(i)), getattr(self, "idx_" + direction + str(i))
                x.add_(self.alpha * F.relu(conv(x[..., idx, :])))  # CAUSE
        for direction in ["r", "l"]:
            for i in range(self.iter):
                conv, idx = getattr(self, "conv_" + direction + str(i)), getattr(self, "idx_" + direction + str(i))
                x.add_(self.alpha * F.relu(conv(x[..., idx])))  # CAUSE
        return x


class PlainDecoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.dropout, self.conv8 = nn.Dropout2d(0.1), nn.Conv2d(cfg.chan, cfg.num_classes, 1)

    def forward(self, x):
        return F.interpolate(self.conv8(self.dropout(x)), scale_factor=4, mode="bilinear", align_corners=False)


class ExistHead(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv8 = nn.Conv2d(cfg.chan, cfg.num_classes, 1)
        self.fc9 = nn.Linear(cfg.num_classes * 16, 32)
        self.fc10 = nn.Linear(32, cfg.num_classes - 1)

    def forward(self, x):
        x = F.avg_pool2d(F.softmax(self.conv8(x), dim=1), 2)
        return self.fc10(F.relu(self.fc9(x.flatten(1))))


class RESANet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = cfg.chan
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, c, 1))
        nn.init.constant_(self.backbone[4].weight, 160.0)  # the range of the pretrained backbone's last stage
        self.resa, self.decoder, self.heads = RESA(cfg), PlainDecoder(cfg), ExistHead(cfg)

    def forward(self, img):
        fea = self.resa(self.backbone(img))
        return {"seg": self.decoder(fea), "exist": self.heads(fea)}


def roads(gen, n, size=32):
    """Up to three lanes, broken by gaps that have to be filled."""
    ys, xs = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    img, label = 0.2 * torch.randn(n, 3, size, size, generator=gen), torch.zeros(n, size, size, dtype=torch.long)
    exist = (torch.rand(n, 3, generator=gen) < 0.8).float()
    for b in range(n):
        for lane in range(3):
            if exist[b, lane]:
                slope = (lane - 1) * 0.4 + 0.1 * torch.randn(1, generator=gen)
                on = (xs - (size / 2 + (lane - 1) * 6 + slope * (ys - 8))).abs() < 1.5
                label[b][on] = lane + 1
                dashes = ((ys + 7 * lane) % 8 < 4).float()
                img[b] += on * dashes
    return img, label, exist


class Runner:
    def __init__(self, cfg):
        self.cfg, self.net = cfg, RESANet(cfg)
        watch(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=cfg.lr, momentum=cfg.momentum, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: (1 - i / cfg.total_iter) ** 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
        self.weights = torch.tensor([0.4, 1.0, 1.0, 1.0])

    def loss(self, output, label, exist):
        seg = F.nll_loss(F.log_softmax(output["seg"].float(), dim=1), label, weight=self.weights)
        return seg + 0.1 * F.binary_cross_entropy_with_logits(output["exist"].float(), exist)

    def train(self):
        gen = torch.Generator().manual_seed(50)
        for it in range(self.cfg.total_iter):
            img, label, exist = roads(gen, self.cfg.batch_size)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.loss(self.net(img), label, exist)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            if it % 8 == 0:
                print(f"iter {it} loss {loss.item():.4f} scale {self.scaler.get_scale():g}")


Runner(Config()).train()
