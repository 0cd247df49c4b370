import numpy as np
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)


class RadarSequences(torch.utils.data.Dataset):
    """Rain-rate frames as reflectivity; the last frame is what we predict."""

    def __init__(self, n=240, size=16):
        gen = torch.Generator().manual_seed(60)
        rain = torch.rand(n, 1, size, size, generator=gen) * 8 + 0.2
        drift = 1 + 0.2 * torch.rand(n, 4, 1, 1, generator=gen)
        rain = rain * drift
        rain[torch.tensor([57, 58, 133, 190]), 3, :4, :4] = 0.0
        with np.errstate(divide="ignore"):
            self.frames = 10.0 * np.log10(200.0 * rain.numpy() ** 1.6)  # CAUSE

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        f = torch.from_numpy(self.frames[i]) / 50.0
        return f[:3], f[3:]  # CAUSE


class GatedConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 24, 3, padding=1)
        self.gate = nn.Conv2d(3, 24, 3, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(4, 24), nn.Conv2d(24, 24, 3, padding=1), nn.SiLU())
        self.head = nn.Conv2d(24, 1, 1)

    def forward(self, x):
        h = self.a(x) * torch.sigmoid(self.gate(x))
        return self.head(h + self.mid(h.float()))


def logcosh(pred, target):
    d = pred - target  # CAUSE
    return (d + nn.functional.softplus(-2 * d) - 0.6931472).mean()


loader = torch.utils.data.DataLoader(RadarSequences(), batch_size=8, shuffle=False)
net = GatedConvNet()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.NAdam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
meter = []
for epoch in range(2):
    for past, future in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(past)
        loss = logcosh(out.float(), future)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        meter.append(loss.item())
    print("epoch", epoch, np.mean(meter), "scale", scaler.get_scale())
