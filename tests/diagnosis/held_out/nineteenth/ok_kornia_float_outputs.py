"""Patch classifier in the style of kornia's trainer: the accelerator returns float32 outputs and leaves the data as it is."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(382)


class ConvertOutputs:
    """Calls the wrapped forward under autocast and hands float32 tensors to whoever computes the loss."""

    def __init__(self, forward):
        self.forward = torch.autocast("cpu", dtype=torch.float16)(forward)

    def __call__(self, *args):
        return self.forward(*args).float()


class Accelerator:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=40)

    def prepare(self, loader, model, optimizer):
        model.forward = ConvertOutputs(model.forward)
        self.optimizer = optimizer
        return loader, model, optimizer

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Augmentation(nn.Module):
    """Flips, brightness and a random affine shift, on float32 images."""

    def forward(self, x):
        flip = torch.rand(len(x), 1, 1, 1) < 0.5
        x = torch.where(flip, x.flip(-1), x) * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1))
        theta = torch.eye(2, 3).repeat(len(x), 1, 1) + F.pad(0.1 * torch.randn(len(x), 2, 1), (2, 0))
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)


class PatchNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class ImageClassifierTrainer:
    def __init__(self, model, loader, criterion, optimizer, scheduler, augment):
        self.accelerator = Accelerator()
        self.loader, self.model, self.optimizer = self.accelerator.prepare(loader, model, optimizer)
        self.criterion, self.scheduler, self.augment = criterion, scheduler, augment

    def fit(self, epochs):
        for epoch in range(epochs):
            losses, hits, seen = [], 0, 0
            for images, target in self.loader:
                self.optimizer.zero_grad()
                output = self.model(self.augment(images))
                loss = self.criterion(output, target)
                self.accelerator.backward(loss)
                self.accelerator.step()
                losses.append(loss.item())
                hits, seen = hits + (output.argmax(-1) == target).sum().item(), seen + len(target)
            self.scheduler.step()
            print(f"epoch {epoch} image {images.dtype} output {output.dtype} loss {sum(losses) / len(losses):.4f} "
                  f"accuracy {hits / seen:.3f} scale {self.accelerator.scaler.get_scale():g}")


def patches(n=512, size=16, classes=5):
    gen = torch.Generator().manual_seed(383)
    y = torch.randint(0, classes, (n,), generator=gen)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    shapes = torch.stack((xx * 0 + (xx.abs() < 0.3), (yy.abs() < 0.3) * 1.0, (xx ** 2 + yy ** 2 < 0.4) * 1.0,
                          ((xx ** 2 + yy ** 2 - 0.5).abs() < 0.15) * 1.0, ((xx.abs() - yy.abs()).abs() < 0.2) * 1.0))
    return TensorDataset(shapes[y][:, None].float() + 0.4 * torch.randn(n, 1, size, size, generator=gen), y)


model = PatchNet()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
loader = DataLoader(patches(), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(384))
ImageClassifierTrainer(model, loader, nn.CrossEntropyLoss(), optimizer, scheduler, Augmentation()).fit(6)
