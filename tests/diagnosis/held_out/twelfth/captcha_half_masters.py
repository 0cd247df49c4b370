"""Captcha reading with a pure fp16 network, fp32 masters and an own loss scaler with hysteresis."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(71)
GLYPHS, SLOTS = 8, 3


class Reader(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.ReLU(), nn.Conv2d(c, c, 3, 2, 1), nn.ReLU())
        self.slots = nn.Linear(c * 3 * 8, SLOTS * GLYPHS)

    def forward(self, x):
        return self.slots(self.features(x).flatten(1)).view(-1, SLOTS, GLYPHS)


class HysteresisScaler:
    """Halves only after `patience` overflows in a row of bad luck; doubles after `window` clean steps."""

    def __init__(self, scale=2.0 ** 15, window=10, patience=2):
        self.scale, self.window, self.patience = scale, window, patience
        self.left, self.clean, self.skipped = patience, 0, 0

    def observe(self, finite):
        if finite:
            self.clean += 1
            if self.clean == self.window:
                self.scale, self.clean, self.left = self.scale * 2, 0, self.patience
        else:
            self.clean, self.skipped, self.left = 0, self.skipped + 1, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, 1.0)


class Masters:
    def __init__(self, model):
        self.half = list(model.parameters())
        self.full = [p.detach().float().clone().requires_grad_() for p in self.half]

    def take_gradients(self, scale):
        finite = True
        for h, f in zip(self.half, self.full):
            f.grad = h.grad.float() / scale
            h.grad = None
            finite &= bool(torch.isfinite(f.grad).all())
        return finite

    @torch.no_grad()
    def write_back(self):
        for h, f in zip(self.half, self.full):
            h.copy_(f)


def captchas(n, g, glyphs):
    y = torch.randint(0, GLYPHS, (n, SLOTS), generator=g)
    img = glyphs[y].permute(0, 2, 1, 3).reshape(n, 1, 12, SLOTS * 10)
    img = F.pad(img, (1, 1))
    return (img + 0.2 * torch.randn(img.shape, generator=g)).half(), y


def main(steps=90):
    g = torch.Generator().manual_seed(33)
    glyphs = (torch.rand(GLYPHS, 12, 10, generator=g) > 0.6).float()
    model = Reader().half()
    masters, scaler = Masters(model), HysteresisScaler()
    watch(model)
    opt = torch.optim.Adam(masters.full, lr=2e-3)
    for step in range(steps):
        x, y = captchas(16, g, glyphs)
        logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        (loss * scaler.scale).backward()
        finite = masters.take_gradients(scaler.scale)
        if finite:
            nn.utils.clip_grad_norm_(masters.full, 2.0)
            opt.step()
            masters.write_back()
        scaler.observe(finite)
        if step % 15 == 14:
            print(f"{step + 1} loss {loss.item():.4f} scale {scaler.scale:g} skipped {scaler.skipped}")
    return model


MODULES = [main()]
