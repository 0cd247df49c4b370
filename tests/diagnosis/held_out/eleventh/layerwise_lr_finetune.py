"""Fine-tuning of a residual MLP with layer-wise learning rates and momentum SGD."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Regressor(nn.Module):
    def __init__(self, d_in=10, d=32, depth=7):
        super().__init__()
        self.stem = nn.Linear(d_in, d)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def layer_groups(model, base_lr, decay):
    """The head gets base_lr, each layer below it less."""
    stack = [model.stem, *model.blocks, model.head]
    top = len(stack) - 1
    groups = []
    for depth, layer in enumerate(stack):
        scale = decay ** (depth - top)  # CAUSE
        groups.append({"params": list(layer.parameters()), "lr": base_lr * scale})
    return groups


def warmup(step, steps=60):
    return min(1.0, (step + 1) / steps)


def friedman(n, generator):
    x = torch.rand(n, 10, generator=generator)
    y = (10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4])
    return (x - 0.5) * 3.46, (y - 14.4) / 4.9


model = Regressor()
watch(model)
optimizer = torch.optim.SGD(layer_groups(model, base_lr=0.02, decay=0.5), momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=500)
generator = torch.Generator().manual_seed(2)

for step in range(90):
    x, y = friedman(64, generator)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x)
    loss = F.mse_loss(prediction.float(), y)
    scaler.scale(loss).backward()
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale_before:
        schedule.step()
    if step % 5 == 0:
        lrs = [g["lr"] for g in optimizer.param_groups]
        print(f"{step:3d} loss {loss.item():.4g} lr {min(lrs):.2e}..{max(lrs):.2e} scale {scaler.get_scale():g}")
