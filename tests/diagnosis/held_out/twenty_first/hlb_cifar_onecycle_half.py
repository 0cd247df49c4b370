"""Fast image classifier whose optimizer and one-cycle learning rate live in the default dtype, half."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2981)
DEFAULT_FLOAT = torch.float16
CLASSES, SIDE, STEPS, BS = 10, 6, 100, 64
hyp = {"opt": {"max_lr": 0.35, "momentum": 0.85, "weight_decay": 5e-4,
               "percent_start": 0.25, "div_factor": 1e16, "final_lr_ratio": 0.05}}


class OneCycleLR:
    def __init__(self, optimizer, max_lr, div_factor, final_div_factor, total_steps, pct_start):
        self.optimizer, self.total_steps, self.pct_start, self.epoch_counter = optimizer, total_steps, pct_start, 0
        self.max_lr = torch.tensor(max_lr, dtype=DEFAULT_FLOAT)
        self.initial_lr = self.max_lr / div_factor  # CAUSE
        self.min_lr = self.initial_lr / torch.tensor(final_div_factor, dtype=DEFAULT_FLOAT)  # CAUSE
        self.optimizer.lr = self.get_lr()

    @staticmethod
    def _annealing_linear(start, end, pct):
        return (end - start) * pct + start

    def get_lr(self):
        peak = self.total_steps * self.pct_start
        if self.epoch_counter < peak:
            return self._annealing_linear(self.initial_lr, self.max_lr, self.epoch_counter / peak)
        pct = (self.epoch_counter - peak) / (self.total_steps * (1 - self.pct_start))
        return self._annealing_linear(self.max_lr, self.min_lr, pct)

    def step(self):
        self.epoch_counter += 1
        self.optimizer.lr = self.get_lr()


class SGD:
    def __init__(self, params, momentum, weight_decay):
        self.params, self.momentum, self.wd, self.lr = list(params), momentum, weight_decay, None
        self.b = [torch.zeros_like(p) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, b in zip(self.params, self.b):
            g = p.grad + self.wd * p
            b.mul_(self.momentum).add_(g)
            p.sub_((g + self.momentum * b) * self.lr)


class ConvGroup(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.GroupNorm(4, channels_out)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class SpeedyResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(ConvGroup(3, 16), nn.MaxPool2d(2), ConvGroup(16, 16), nn.Flatten(), nn.Linear(16 * 9, CLASSES))

    def forward(self, x):
        return self.net(x) * 0.5


def fetch_batches(gen):
    """Ten colour patterns with noise, flipped at random."""
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(10))
    while True:
        Y = torch.randint(0, CLASSES, (BS,), generator=gen)
        X = patterns[Y] + 0.8 * torch.randn(BS, 3, SIDE, SIDE, generator=gen)
        flip = torch.rand(BS, 1, 1, 1, generator=gen) < 0.5
        yield torch.where(flip, X.flip(3), X).to(DEFAULT_FLOAT), Y


def train_cifar(loss_scaler=128.0):
    model = SpeedyResNet().to(DEFAULT_FLOAT)
    watch(model)
    opt = SGD(model.parameters(), hyp["opt"]["momentum"], hyp["opt"]["weight_decay"])
    final_div_factor = 1.0 / (hyp["opt"]["div_factor"] * hyp["opt"]["final_lr_ratio"])
    lr_sched = OneCycleLR(opt, max_lr=hyp["opt"]["max_lr"], div_factor=hyp["opt"]["div_factor"],
                          final_div_factor=final_div_factor, total_steps=STEPS, pct_start=hyp["opt"]["percent_start"])
    batches, losses = fetch_batches(torch.Generator().manual_seed(1)), []
    for i in range(STEPS):
        X, Y = next(batches)
        loss = F.cross_entropy(model(X).float(), Y, label_smoothing=0.1)
        opt.zero_grad()
        (loss * loss_scaler).backward()
        for p in opt.params:
            p.grad /= loss_scaler
        opt.step()
        lr_sched.step()
        losses.append(loss.item())
        if (i + 1) % 10 == 0:
            print(f"{i + 1:3d} {losses[-1]:7.4f} loss, {opt.lr.item():.6f} LR")
    return model, losses


model, losses = train_cifar()
MODULES = (model,)
