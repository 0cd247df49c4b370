"""Detector calibration maps: train with batch statistics first, then freeze them for fine-tuning (usual two-stage recipe)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class ConvUnit(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout, momentum=0.2)

    def forward(self, x):
        y = self.conv(x)  # CAUSE
        y = self.bn(y)  # CAUSE
        return F.relu(y)


class FlatFieldNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.trunk = nn.Sequential(ConvUnit(1, 16), ConvUnit(16, 24, 2), ConvUnit(24, 32, 2))
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        return self.fc(self.trunk(x).mean((-2, -1)))


def freeze_bn(net):
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.requires_grad_(False)


def frames(step, gen, n=16, size=16):
    y = torch.randint(0, 4, (n,), generator=gen)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pat = torch.stack([torch.sin(xx * 1.3), torch.sin(yy * 1.3), torch.sin((xx + yy) * 0.9), torch.cos(xx * yy * 0.2)])
    counts = 4000 + 900 * pat[y] + 500 * torch.randn(n, size, size, generator=gen)
    if step == 14:
        counts[3] *= 20                                  # beam not attenuated
    return counts.unsqueeze(1), y


def loop(net, steps=70, freeze_at=50):
    gen = torch.Generator().manual_seed(909)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=2000)
    net.train()
    seen = []
    for step in range(1, steps + 1):
        if step == freeze_at:
            freeze_bn(net)
            for grp in opt.param_groups:
                grp["lr"] = 0.01
        x, y = frames(step, gen)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        seen.append(loss.item())
        if step % 15 == 0:
            print(f"{step:3d} loss {sum(seen[-5:]) / 5:.3f} scale {scaler.get_scale():g}")


torch.set_num_threads(1)
torch.manual_seed(2)
net = FlatFieldNet()
MODULES = [net]
watch(*MODULES)
loop(net)
