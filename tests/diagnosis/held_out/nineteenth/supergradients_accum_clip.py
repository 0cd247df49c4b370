"""Image classifier with a hook-driven trainer: batch accumulation, label smoothing, mixed precision, EMA, gradient clipping."""
import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(653)
CLASSES, SIZE = 6, 12


class RepBlock(nn.Module):
    """3x3 and 1x1 branch that could be fused at inference."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv3, self.bn3 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu(self.bn3(self.conv3(x)) + self.bn1(self.conv1(x)))


class RepNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(RepBlock(3, 16, 2), RepBlock(16, 24, 2))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


class ModelEMA:
    def __init__(self, model, decay):
        self.ema, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.ema.state_dict().values(), model.state_dict().values()):
            if e.is_floating_point():
                e.mul_(self.decay).add_(m, alpha=1 - self.decay)
            else:
                e.copy_(m)


class Tiles:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        base = torch.Generator().manual_seed(654)
        self.patterns = F.interpolate(torch.randn(CLASSES, 3, 4, 4, generator=base), size=(SIZE, SIZE))

    def batch(self, n):
        y = torch.randint(0, CLASSES, (n,), generator=self.gen)
        return self.patterns[y] + 0.8 * torch.randn(n, 3, SIZE, SIZE, generator=self.gen), y


class CosineLRCallback:
    def __init__(self, optimizer, lr, total):
        self.optimizer, self.lr, self.total = optimizer, lr, total

    def __call__(self, step):
        lr = self.lr * min(1.0, (step + 1) / 5) * (0.5 + 0.5 * torch.cos(torch.tensor(3.1416 * step / self.total)).item())
        for group in self.optimizer.param_groups:
            group["lr"] = lr


class Trainer:
    def __init__(self, net, params):
        self.net, self.training_params = net, params
        self.optimizer = torch.optim.SGD(net.parameters(), lr=params.initial_lr, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", enabled=params.mixed_precision)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.ema_model = ModelEMA(net, params.ema_decay)
        self.update_lr = CosineLRCallback(self.optimizer, params.initial_lr, params.max_epochs * params.batches // params.batch_accumulate)
        self.global_step = 0

    def backward_step(self, loss, batch_idx):
        self.scaler.scale(loss).backward()
        if self.training_params.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.training_params.clip_grad_norm)  # CAUSE
        # accumulate gradients for x batches before optimizing
        if (batch_idx + 1) % self.training_params.batch_accumulate == 0:
            self.update_lr(self.global_step)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.ema_model.update(self.net)
            self.global_step += 1

    def _train_epoch(self, loader):
        self.net.train()
        total = 0.0
        for batch_idx in range(self.training_params.batches):
            inputs, targets = loader.batch(self.training_params.batch_size)
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.training_params.mixed_precision):
                outputs = self.net(inputs)
                loss = self.criterion(outputs.float(), targets)
            self.backward_step(loss / self.training_params.batch_accumulate, batch_idx)
            total += loss.item()
        return total / self.training_params.batches

    @torch.no_grad()
    def _validate(self, inputs, targets):
        return (self.ema_model.ema(inputs).argmax(-1) == targets).float().mean().item()

    def train(self, train_loader, valid):
        for epoch in range(self.training_params.max_epochs):
            loss = self._train_epoch(train_loader)
            print(f"SUMMARY OF EPOCH {epoch}: train loss {loss:.4f}, valid accuracy {self._validate(*valid):.3f}, "
                  f"lr {self.optimizer.param_groups[0]['lr']:.4f}, scale {self.scaler.get_scale():g}")


net = RepNet()
watch(net)
params = SimpleNamespace(initial_lr=0.1, max_epochs=8, batches=32, batch_size=12, batch_accumulate=4, clip_grad_norm=5.0,
                         mixed_precision=True, ema_decay=0.8)
Trainer(net, params).train(Tiles(1), Tiles(2).batch(240))
