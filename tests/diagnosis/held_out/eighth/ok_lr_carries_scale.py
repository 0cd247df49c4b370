"""Patch classifier with half weights; the static loss scale is carried by the learning rate of plain SGD."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(70)
gen = torch.Generator().manual_seed(71)
PATTERN = torch.randn(7, 3, 12, 12, generator=gen)


def patches(n=32):
    y = torch.randint(0, 7, (n,), generator=gen)
    shift = torch.randint(-2, 3, (2,), generator=gen).tolist()
    x = torch.roll(PATTERN[y], shift, dims=(2, 3)) + 0.7 * torch.randn(n, 3, 12, 12, generator=gen)
    return x, y


class PatchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.fc = nn.Linear(24 * 9, 7)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc(x.flatten(1))


S = 1024.0
LR, WD, MOMENTUM = 0.03, 5e-4, 0.9
net = PatchNet().half()
MODULES = [net]
copy32 = [p.detach().clone().float().requires_grad_(True) for p in net.parameters()]
opt = torch.optim.SGD(copy32, lr=LR / S, momentum=MOMENTUM, weight_decay=WD * S)
warmup = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.125, total_iters=8)


def push_and_step():
    for w, p in zip(copy32, net.parameters()):
        w.grad = p.grad.float()
    if not all(bool(torch.isfinite(w.grad).all()) for w in copy32):
        return False
    opt.step()
    with torch.no_grad():
        for w, p in zip(copy32, net.parameters()):
            p.copy_(w)
    return True


def main():
    watch(*MODULES)
    hits = done = 0
    for step in range(1, 61):
        x, y = patches()
        logits = net(x.to(net.fc.weight.dtype))
        loss = F.cross_entropy(logits.float(), y)
        net.zero_grad(set_to_none=True)
        (loss * S).backward()
        done += push_and_step()
        warmup.step()
        hits += (logits.argmax(1) == y).float().mean().item()
        if step % 15 == 0:
            largest = max(w.grad.abs().max().item() for w in copy32)
            print(f"step {step} loss {loss.item():.4f} acc {hits / 15:.3f} taken {done} largest stored gradient {largest:.1f}")
            hits = 0


main()
