import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(42)


class UpBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.ConvTranspose2d(cin, cout, 4, stride=2, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


class DisparityNet(nn.Module):
    """Encoder-decoder; disparities are given in metres^-1 and are small."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(2, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.dec = nn.Sequential(UpBlock(32, 16), UpBlock(16, 8))
        self.out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return 0.01 * torch.sigmoid(self.out(self.dec(self.enc(x))))


def scene(gen, n=4, s=48):
    base = torch.rand(n, 1, 6, 6, generator=gen)
    disp = nn.functional.interpolate(base, size=(s, s), mode="bilinear") * 0.01
    left = torch.rand(n, 1, s, s, generator=gen) + disp * 60
    right = left - disp * 60
    return torch.cat([left, right], 1), disp


def charbonnier(pred, target):
    return ((pred - target).pow(2) + 1e-6).sqrt().mean()


def main():
    gen = torch.Generator().manual_seed(1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-14)
    watch(*MODULES)
    for it in range(40):
        images, disp = scene(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = net(images)
        loss = charbonnier(pred.float(), disp)
        opt.zero_grad()
        loss.backward()  # CAUSE
        opt.step()
        if it % 10 == 0:
            g = net.enc[0].weight.grad
            print(it, loss.item(), g.abs().mean().item())


net = DisparityNet()
MODULES = [net]
main()
