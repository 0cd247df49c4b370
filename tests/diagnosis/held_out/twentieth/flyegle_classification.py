"""Image classification training script with an optional half-precision branch, SGD and warm-up."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2021)


class cfg:
    fp16 = True
    lr = 0.03
    batch_size = 24
    iterations = 100
    warmup = 10
    num_classes = 6
    image = 12


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + x)


class ResNet(nn.Module):
    def __init__(self, planes=12):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.layer1, self.layer2 = BasicBlock(planes), BasicBlock(planes)
        self.fc = nn.Linear(planes, cfg.num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


class LabelSmoothing(nn.Module):
    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, target):
        logp = F.log_softmax(logits.float(), dim=-1)
        nll = -logp.gather(1, target[:, None]).squeeze(1)
        return ((1 - self.smoothing) * nll - self.smoothing * logp.mean(-1)).mean()


class ImageData:
    """Textures: each class has its own three-channel wave, seen at a random phase."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        g = torch.Generator().manual_seed(17)
        self.freq = torch.rand(cfg.num_classes, 2, generator=g) * 2.2 + 0.2
        self.color = torch.randn(cfg.num_classes, 3, generator=g)
        axis = torch.arange(cfg.image).float()
        self.yy, self.xx = torch.meshgrid(axis, axis, indexing="ij")

    def batch(self):
        n = cfg.batch_size
        label = torch.randint(0, cfg.num_classes, (n,), generator=self.gen)
        phase = torch.rand(n, 1, 1, generator=self.gen) * 6.28
        f = self.freq[label][:, :, None, None]
        wave = torch.sin(f[:, 0] * self.yy + f[:, 1] * self.xx + phase)
        image = wave[:, None] * self.color[label][:, :, None, None]
        return image + 0.8 * torch.randn(n, 3, cfg.image, cfg.image, generator=self.gen), label


def adjust_learning_rate(optimizer, it):
    lr = cfg.lr * min(1.0, (it + 1) / cfg.warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr


data, model = ImageData(3), ResNet()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
criterion = LabelSmoothing()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=15)

for it in range(cfg.iterations):
    adjust_learning_rate(optimizer, it)
    images, labels = data.batch()
    optimizer.zero_grad()
    if cfg.fp16 is True:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
            loss = criterion(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
    optimizer.step()  # CAUSE
    if (it + 1) % 10 == 0:
        acc = (logits.argmax(1) == labels).float().mean()
        print(f"iter {it + 1} loss {loss.item():.4f} top1 {acc:.3f} scale {scaler.get_scale():g}")

MODULES = (model,)
