"""Cell segmentation, network stored in half precision, float32 master copy and a hand-written dynamic scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(27)


class SmallUNet(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.down0, self.down1 = nn.Conv2d(1, ch, 3, padding=1), nn.Conv2d(ch, 2 * ch, 3, padding=1)
        self.up = nn.Conv2d(3 * ch, ch, 3, padding=1)
        self.seg = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        a = torch.relu(self.down0(x))
        b = torch.relu(self.down1(F.max_pool2d(a, 2)))
        b = b.repeat_interleave(2, -1).repeat_interleave(2, -2)
        return self.seg(torch.relu(self.up(torch.cat([a, b], 1))))


class DynamicLossScale:
    def __init__(self, value=2.0 ** 15, window=14):
        self.value, self.window, self.clean = value, window, 0

    def update(self, overflow):
        if overflow:
            self.value, self.clean = self.value / 2, 0
        else:
            self.clean += 1
            if self.clean % self.window == 0:
                self.value *= 2


def soft_dice(logits, mask):
    p = torch.sigmoid(logits.float()).flatten(1)
    m = mask.flatten(1)
    return 1 - ((2 * (p * m).sum(1) + 1.0) / (p.sum(1) + m.sum(1) + 1.0)).mean()


def cells(n, g, size=32):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.rand(n, 2, generator=g) * 20 + 6
    r = torch.rand(n, generator=g) * 4 + 3
    d2 = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
    mask = (d2 < (r ** 2)[:, None, None]).float().unsqueeze(1)
    return mask + 0.4 * torch.randn(n, 1, size, size, generator=g), mask


net = SmallUNet().half()
MODULES = [net]
master = [p.detach().float().clone().requires_grad_(True) for p in net.parameters()]
opt = torch.optim.Adam(master, lr=2e-3)
scale = DynamicLossScale()


def run(steps=64):
    watch(*MODULES)
    g = torch.Generator().manual_seed(6)
    for step in range(steps):
        img, mask = cells(6, g)
        net.zero_grad(set_to_none=True)
        logits = net(img.half())
        loss = soft_dice(logits, mask) + F.binary_cross_entropy_with_logits(logits.float(), mask)
        (loss * scale.value).backward()
        grads = [p.grad.float() / scale.value for p in net.parameters()]
        overflow = not all(torch.isfinite(gr).all() for gr in grads)
        if not overflow:
            for m, gr in zip(master, grads):
                m.grad = gr
            torch.nn.utils.clip_grad_norm_(master, 1.0)
            opt.step()
            with torch.no_grad():
                for p, m in zip(net.parameters(), master):
                    p.copy_(m)
        scale.update(overflow)
        if step % 10 == 0 or overflow:
            print(f"step {step} loss {loss.item():.4f} scale {scale.value:g} overflow {overflow}")


run()
