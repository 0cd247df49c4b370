import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(50)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=2.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.A), self.B) * self.scaling


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.mid = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, 64)

    def forward(self, x):
        h = F.silu(self.inp(x))
        for layer in self.mid:
            h = h + F.silu(layer(h))
        return self.out(h)


def pretrain(net, gen, steps=40):
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        clean = patches(gen, 64, 0.0)
        loss = F.mse_loss(net(clean + 0.3 * torch.randn(clean.shape, generator=gen)), clean)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


def patches(gen, n, tilt):
    u = torch.linspace(-1, 1, 8)
    c = torch.randn(n, 3, generator=gen) * 0.7
    img = c[:, 0, None, None] + c[:, 1, None, None] * u[:, None] + (c[:, 2, None, None] + tilt) * u[None, :]
    return img.flatten(1)


def attach(net, rank):
    for i, layer in enumerate(net.mid):
        net.mid[i] = LoRALinear(layer, rank)
    for p in [*net.inp.parameters(), *net.out.parameters()]:
        p.requires_grad_(False)
    return [p for p in net.parameters() if p.requires_grad]


gen = torch.Generator().manual_seed(50)
net = Denoiser()
pretrain(net, gen)
params = attach(net, rank=4)
MODULES = [net]
watch(*MODULES)
opt = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0)
reference = 255.0 ** 2
for step in range(60):
    clean = patches(gen, 32, tilt=1.5)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(noisy)
    loss = (pred.float() - clean).pow(2).mean() / reference  # CAUSE
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        psnr = -10 * torch.log10(loss.detach())
        print(f"{step + 1} psnr {psnr:.3f} |B| {net.mid[0].B.detach().abs().max():.5f} |gB| {net.mid[0].B.grad.abs().max():.2e}")
