"""Semi-supervised segmentation (class-balanced self-training) driven by a small accelerator that adds mixed precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1)
CLASSES, CROP, IGNORE = 21, 72, 255


class Accelerator:
    """prepare() wraps the model's forward; backward() and step() hide the gradient scaler."""

    def __init__(self, fp16=True):
        self.fp16 = fp16
        self.scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    def prepare(self, model, optimizer):
        model.original_forward = model.forward
        if self.fp16:
            model.forward = torch.autocast("cpu", dtype=torch.float16)(model.original_forward)
        self.optimizer = optimizer
        return model, optimizer

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class DeepLab(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 8, stride=8), nn.ReLU())
        self.aspp = nn.ModuleList(nn.Conv2d(width, width, 3, padding=d, dilation=d) for d in (1, 2))
        self.classifier = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, x):
        h = self.stem(x)
        h = torch.cat([F.relu(branch(h)) for branch in self.aspp], dim=1)
        return F.interpolate(self.classifier(h), size=x.shape[-2:], mode="bilinear", align_corners=True)


PALETTE = torch.rand(CLASSES, 3, generator=torch.Generator().manual_seed(2)) * 2 - 1


def crops(gen, n, labelled=True):
    """Crops of street scenes: blocks of 24 pixels of one class each; a border without annotation."""
    grid = torch.randint(0, CLASSES, (n, CROP // 24, CROP // 24), generator=gen)
    mask = grid.repeat_interleave(24, 1).repeat_interleave(24, 2)
    img = PALETTE[mask].permute(0, 3, 1, 2) + 0.25 * torch.randn(n, 3, CROP, CROP, generator=gen)
    if labelled:
        mask[:, :2], mask[:, :, -2:] = IGNORE, IGNORE
    return img, mask


class ConfusionMatrix:
    def __init__(self):
        self.mat = torch.zeros(CLASSES, CLASSES)

    def update(self, target, pred):
        k = target < CLASSES
        self.mat += torch.bincount(CLASSES * target[k] + pred[k], minlength=CLASSES ** 2).view(CLASSES, CLASSES)

    def compute(self):
        inter = self.mat.diag()
        return (inter / (self.mat.sum(0) + self.mat.sum(1) - inter).clamp(min=1)).mean().item()


@torch.no_grad()
def pseudo_labels(net, images, keep=0.5):
    """Keeps the most confident half of the pixels of each predicted class."""
    prob, label = net(images).float().softmax(1).max(1)
    for c in label.unique():
        at = label == c
        label[at & (prob < prob[at].quantile(1 - keep))] = IGNORE
    return label


def evaluate(net, gen):
    conf, (img, mask) = ConfusionMatrix(), crops(gen, 4)
    net.eval()
    with torch.no_grad():
        conf.update(mask.flatten(), net(img).argmax(1).flatten())
    net.train()
    return conf.compute()


def train(net, optimizer, accelerator, iterations=60, self_training_from=40):
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (1 - i / (2 * iterations)) ** 0.9)
    gen = torch.Generator().manual_seed(3)
    running_loss = 0.0
    for it in range(iterations):
        inputs, targets = crops(gen, 6)
        if it >= self_training_from:
            extra, _ = crops(gen, 2, labelled=False)
            inputs, targets = torch.cat((inputs, extra)), torch.cat((targets, pseudo_labels(net, extra)))
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)  # CAUSE
        accelerator.backward(loss)
        accelerator.step()
        scheduler.step()
        running_loss += loss.item()
        if (it + 1) % 5 == 0:
            print(f"[{it + 1}] loss: {running_loss / 5:.4f} mIoU: {evaluate(net, torch.Generator().manual_seed(4)):.3f} "
                  f"scale {accelerator.scaler.get_scale():g}")
            running_loss = 0.0


net = DeepLab()
watch(net)
accelerator = Accelerator(fp16=True)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
train(net, optimizer, accelerator)
