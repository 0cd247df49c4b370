"""Audio-tagging on mel patches with a hand-written LARS and a hand-written dynamic loss scale."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(31)


class Lars(torch.optim.Optimizer):
    """Layer-wise trust ratio with momentum; gradients arrive times the loss scale."""

    def __init__(self, params, lr=0.02, momentum=0.9, wd=1e-4):
        super().__init__(params, dict(lr=lr, momentum=momentum, wd=wd))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["velocity"] = torch.zeros_like(p)

    @torch.no_grad()
    def collect(self, inv_scale):
        """Unscales, folds the gradient into the velocity; False if something overflowed."""
        finite = True
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.mul_(inv_scale)
                finite = finite and bool(torch.isfinite(g).all())
                self.state[p]["velocity"].mul_(group["momentum"]).add_(g + group["wd"] * p)  # CAUSE
        return finite

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p]["velocity"]
                trust = (p.norm() + 1e-3) / (v.norm() + 1e-8)
                p.sub_(trust * v, alpha=group["lr"])


class Scale:
    def __init__(self, value, every):
        self.value, self.every, self.good = value, every, 0

    def update(self, finite):
        if not finite:
            self.value, self.good = max(self.value / 2, 1.0), 0
            return
        self.good += 1
        if self.good % self.every == 0:
            self.value *= 2


class PatchTagger(nn.Module):
    def __init__(self, width=48, tags=8):
        super().__init__()
        self.patch = nn.Conv2d(1, width, (8, 4), stride=(8, 4))
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)
        self.tags = nn.Linear(width, tags)

    def forward(self, mel):
        x = self.patch(mel.unsqueeze(1)).flatten(2).transpose(1, 2)
        return self.tags((x + self.mix(self.norm(x))).mean(1))


gen = torch.Generator().manual_seed(2)
templates = torch.randn(8, 32, 24, generator=gen)


def clips(n=12):
    y = (torch.rand(n, 8, generator=gen) < 0.3).float()
    mel = torch.einsum("nt,tfs->nfs", y, templates) + 0.3 * torch.randn(n, 32, 24, generator=gen)
    return mel, y


model = PatchTagger()
MODULES = [model]
watch(*MODULES)
opt, scale = Lars(model.parameters()), Scale(2.0 ** 16, every=8)
lost = 0
for step in range(80):
    mel, y = clips()
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(mel)
        loss = F.binary_cross_entropy_with_logits(logits.float(), y)
    (loss * scale.value).backward()
    finite = opt.collect(1.0 / scale.value)
    if finite:
        opt.step()
    else:
        lost += 1
    scale.update(finite)
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f} scale 2^{math.log2(scale.value):.0f} dropped {lost}")
