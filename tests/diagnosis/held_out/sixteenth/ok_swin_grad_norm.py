"""Window attention on small textures; prints the running mean of loss and gradient norm."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)


class AverageMeter:
    def __init__(self):
        self.val = self.sum = self.count = self.avg = 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class WindowAttention(nn.Module):
    def __init__(self, dim, window, heads):
        super().__init__()
        self.window, self.heads = window, heads
        self.relative_position_bias = nn.Parameter(torch.zeros(heads, window * window, window * window))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.relative_position_bias
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


class SwinBlock(nn.Module):
    def __init__(self, dim, window=4, heads=4, shift=0):
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, window, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, h, w, c = x.shape
        s, m = self.shift, self.window
        y = torch.roll(self.norm1(x), (-s, -s), (1, 2)).view(b, h // m, m, w // m, m, c).permute(0, 1, 3, 2, 4, 5)
        y = self.attn(y.reshape(-1, m * m, c)).view(b, h // m, w // m, m, m, c).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(y.reshape(b, h, w, c), (s, s), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, dim=32, classes=6):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(SwinBlock(dim), SwinBlock(dim, shift=2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.blocks(self.patch(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


def textures(gen, n=16, size=32):
    """Stripes of six directions and one wave length."""
    y = torch.randint(0, 6, (n,), generator=gen)
    grid = torch.arange(size).float()
    angle = (y * torch.pi / 6).view(-1, 1, 1)
    wave = torch.sin((grid.view(1, -1, 1) * angle.sin() + grid.view(1, 1, -1) * angle.cos()) * 1.3
                     + 6 * torch.rand(n, 1, 1, generator=gen))
    return wave[:, None] + 0.4 * torch.randn(n, 3, size, size, generator=gen), y


model = Swin()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=20)
loss_meter, norm_meter, scaler_meter = AverageMeter(), AverageMeter(), AverageMeter()
gen = torch.Generator().manual_seed(41)
for idx in range(90):
    samples, targets = textures(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(samples)
        loss = F.cross_entropy(outputs.float(), targets, label_smoothing=0.1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    loss_meter.update(loss.item(), len(targets))
    norm_meter.update(grad_norm.item())
    scaler_meter.update(scaler.get_scale())
    if idx % 10 == 0 or idx == 89:
        print(f"Train: [{idx}/90] loss {loss_meter.val:.4f} ({loss_meter.avg:.4f}) grad_norm {norm_meter.val:.4f} "
              f"({norm_meter.avg:.4f}) loss_scale {scaler_meter.val:.4f} ({scaler_meter.avg:.4f})")
