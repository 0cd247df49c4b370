"""Source subtraction on radio sky maps (Jy per beam). Half-precision network, float32 master parameters."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)
HALF = torch.float16


class SkyNet(nn.Module):
    UNIT = 1e-3        # the network works in mJy

    def __init__(self, ch=8):
        super().__init__()
        self.enc = nn.Conv2d(1, ch, 5, padding=2)
        self.mid = nn.Conv2d(ch, ch, 3, padding=1)
        self.dec = nn.Conv2d(ch, 1, 5, padding=2)

    def forward(self, x):
        x = torch.relu(self.enc(x / self.UNIT))
        x = x + torch.relu(self.mid(x))
        return self.dec(x) * self.UNIT


class MixedPrecisionTrainer:
    """Half model, float32 copies for the optimizer, fixed loss scale."""

    def __init__(self, model, lr, loss_scale):
        self.model, self.loss_scale = model, loss_scale
        self.model_params = list(model.parameters())
        self.master_params = [nn.Parameter(p.detach().float().clone()) for p in self.model_params]
        self.opt = torch.optim.Adam(self.master_params, lr=lr, eps=1e-16)

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None

    def backward(self, loss):
        (loss * self.loss_scale).backward()  # CAUSE

    def step(self):
        for master, p in zip(self.master_params, self.model_params):
            master.grad = p.grad.float() / self.loss_scale
        norm = torch.stack([m.grad.norm() for m in self.master_params]).norm()
        if not torch.isfinite(norm):
            return norm
        self.opt.step()
        with torch.no_grad():
            for master, p in zip(self.master_params, self.model_params):
                p.copy_(master)
        return norm


def observe(n, size, g):
    diffuse = nn.functional.interpolate(torch.randn(n, 1, 4, 4, generator=g), size=size, mode="bicubic") * 4e-4
    points = (torch.rand(n, 1, size, size, generator=g) > 0.995).float() * 3e-3
    return diffuse + points, diffuse


net = SkyNet().to(HALF)
MODULES = [net]
trainer = MixedPrecisionTrainer(net, lr=2e-3, loss_scale=1.0)


def train(n_steps=36):
    watch(*MODULES)
    g = torch.Generator().manual_seed(101)
    for step in range(n_steps):
        dirty, target = observe(6, 64, g)
        trainer.zero_grad()
        clean = net(dirty.to(HALF))
        loss = nn.functional.mse_loss(clean.float(), target)
        trainer.backward(loss)
        norm = trainer.step()
        if step % 10 == 0:
            print(f"step {step} rms {loss.item() ** 0.5 * 1e3:.4f} mJy |g| {norm.item():.3e}")


train()
