import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def unitwise_norm(x):
    if x.dim() <= 1:
        return x.norm()
    return x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))


@torch.no_grad()
def adaptive_clip_grad(params, clip_factor=0.02, eps=1e-3):
    for p in params:
        if p.grad is None:
            continue
        limit = unitwise_norm(p).clamp(min=eps) * clip_factor
        gnorm = unitwise_norm(p.grad)
        p.grad.copy_(torch.where(gnorm > limit, p.grad * (limit / gnorm.clamp(min=1e-6)), p.grad))


class WSConv2d(nn.Conv2d):
    """weight standardisation with a learned gain"""

    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        w = self.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
        w = (w - mean) * torch.rsqrt(var * w[0].numel() + 1e-4) * self.gain
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class NFBlock(nn.Module):
    def __init__(self, c, alpha=0.2, beta=1.0):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.conv1, self.conv2 = WSConv2d(c, c, 3, padding=1), WSConv2d(c, c, 3, padding=1)
        self.skip_gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        y = F.silu(x) * 1.79 / self.beta
        y = self.conv2(F.silu(self.conv1(y)) * 1.79)
        return x + self.alpha * self.skip_gain * y


class NFNet(nn.Module):
    def __init__(self, c=32, classes=10):
        super().__init__()
        self.stem = WSConv2d(3, c, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(NFBlock(c), NFBlock(c, beta=1.02))
        self.fc = nn.Linear(c, classes)

    def forward(self, x):
        return self.fc(F.silu(self.blocks(self.stem(x))).mean((2, 3)))


torch.manual_seed(77)
torch.set_num_threads(1)
gen = torch.Generator().manual_seed(8)
protos = torch.randn(10, 3, 12, 12, generator=gen)
model = NFNet()
MODULES = [model]
body = [p for n, p in model.named_parameters() if not n.startswith("fc")]
opt = torch.optim.SGD([{"params": body}, {"params": model.fc.parameters()}], lr=0.2, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
watch(*MODULES)

for step in range(60):
    y = torch.randint(0, 10, (32,), generator=gen)
    x = protos[y] + 0.5 * torch.randn(32, 3, 12, 12, generator=gen)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    adaptive_clip_grad(model.parameters())  # CAUSE
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(step + 1, f"{loss.item():.4f}")
