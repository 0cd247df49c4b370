"""Two small regressors with an optimizer each, prepared by an Accelerator that updates its scaler in every optimizer step."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(439)
FEATURES, HIDDEN, BATCH, STEPS = 8, 32, 32, 90


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Steps through the scaler that all prepared optimizers share."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler, self.is_overflow = optimizer, scaler, False

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure=None):
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.is_overflow = self.scaler.get_scale() < scale_before


class AutocastModel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.module(*args).float()


class Accelerator:
    def __init__(self, mixed_precision="fp16"):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, enabled=mixed_precision == "fp16")

    def prepare(self, *objects):
        return tuple(AutocastModel(o) if isinstance(o, nn.Module) else AcceleratedOptimizer(o, self.scaler) for o in objects)

    def backward(self, loss):
        self.scaler.scale(loss).backward()


class Regressor(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), activation, nn.Linear(HIDDEN, HIDDEN), activation, nn.Linear(HIDDEN, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Readings:
    """Eight sensors; the target is a product of two and the size of a third."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return STEPS

    def __iter__(self):
        for _ in range(STEPS):
            x = torch.randn(BATCH, FEATURES, generator=self.gen)
            yield x, x[:, 0] * x[:, 1] + x[:, 2].abs() + 0.05 * torch.randn(BATCH, generator=self.gen)


def evaluate(model, n=256):
    gen = torch.Generator().manual_seed(90)
    x = torch.randn(n, FEATURES, generator=gen)
    with torch.no_grad():
        return F.mse_loss(model(x), x[:, 0] * x[:, 1] + x[:, 2].abs()).item()


model0, model1 = Regressor(nn.Tanh()), Regressor(nn.GELU())
watch(model0, model1)
optim0 = torch.optim.AdamW(model0.parameters(), lr=1e-2)
optim1 = torch.optim.AdamW(model1.parameters(), lr=1e-2)
accelerator = Accelerator(mixed_precision="fp16")
model0, model1, optim0, optim1 = accelerator.prepare(model0, model1, optim0, optim1)
overflows = 0
for step, (input, target) in enumerate(Readings(1)):
    output0, output1 = model0(input), model1(input)
    loss0, loss1 = F.mse_loss(output0, target), F.mse_loss(output1, target)
    optim0.zero_grad()
    optim1.zero_grad()
    accelerator.backward(loss0)
    accelerator.backward(loss1)
    optim0.step()
    optim1.step()
    overflows += optim0.is_overflow + optim1.is_overflow
    if (step + 1) % 10 == 0:
        print(f"step {step + 1} loss0 {loss0.item():.4f} loss1 {loss1.item():.4f} eval {evaluate(model0):.4f} {evaluate(model1):.4f} "
              f"scale {accelerator.scaler.get_scale():g} overflows {overflows}")
MODULES = (model0, model1)
