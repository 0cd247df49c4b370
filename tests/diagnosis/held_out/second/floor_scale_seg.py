import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class TinyUNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.d1 = nn.Conv2d(1, c, 3, padding=1)
        self.d2 = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.u1 = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.o = nn.Conv2d(2 * c, 1, 1)

    def forward(self, x):
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(a))
        return self.o(torch.cat([a, F.relu(self.u1(b))], 1))


class AmpState:
    MIN_SCALE = 4096.0

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=200)

    def apply(self, loss, opt):
        opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(opt)
        nn.utils.clip_grad_norm_((p for g in opt.param_groups for p in g["params"]), 10.0)
        before = self.scaler.get_scale()
        self.scaler.step(opt)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.scaler.update(max(self.scaler.get_scale(), self.MIN_SCALE))  # CAUSE


def synth(gen, n, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1, generator=gen) * size
    r = 3 + 5 * torch.rand(n, 1, 1, generator=gen)
    mask = ((xx - cx) ** 2 + (yy - cy) ** 2 < r ** 2).float()[:, None]
    return mask * 1.5 + 0.4 * torch.randn(n, 1, size, size, generator=gen), mask


def criterion(logit, mask):
    bce = F.binary_cross_entropy_with_logits(logit.float(), mask, reduction="none")
    focus = 1 + 4 * (F.max_pool2d(mask, 3, 1, 1) - mask)
    return (bce * focus).flatten(1).sum(1).mean()


def main():
    gen = torch.Generator().manual_seed(19)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    amp = AmpState()
    watch(*MODULES)
    for step in range(60):
        img, mask = synth(gen, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(img)
        loss = criterion(out, mask)
        amp.apply(loss, opt)
        if step % 10 == 9:
            hit = ((out > 0) == mask.bool()).float().mean()
            print(step + 1, f"{loss.item():.3f} acc {hit:.3f} scale {amp.scaler.get_scale():g}")


torch.set_num_threads(1)
torch.manual_seed(19)
net = TinyUNet()
MODULES = [net]
main()
