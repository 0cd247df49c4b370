"""Organ segmentation on CT slices, small windowed-attention net."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, h, w, c = x.shape
        s = self.window
        win = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(win).view(-1, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale  # CAUSE
        attn = attn.softmax(-1)
        o = self.proj((attn @ v).transpose(1, 2).reshape(-1, s * s, c))
        return o.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


class SegNet(nn.Module):
    def __init__(self, dim=32, classes=3):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, 4, stride=4)
        self.attn = WindowAttention(dim, 4, 4)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.ConvTranspose2d(dim, classes, 4, stride=4)

    def forward(self, img):
        x = self.embed(img).permute(0, 2, 3, 1)
        x = self.norm(x + self.attn(x))
        x = x + self.mlp(x)
        return self.head(x.permute(0, 3, 1, 2))


def slices(n, size, gen):
    """Hounsfield-like values, tissue 30..80, bone up to 900, sometimes a metal implant (16-bit scale)"""
    for i in range(n):
        vol = torch.full((4, 1, size, size), -100.0) + 8 * torch.randn(4, 1, size, size, generator=gen)
        mask = torch.zeros(4, size, size, dtype=torch.long)
        for j in range(4):
            y, x = torch.randint(0, size - 14, (2,), generator=gen).tolist()
            vol[j, 0, y:y + 12, x:x + 12] += 170.0
            mask[j, y:y + 12, x:x + 12] = 1
            y, x = torch.randint(0, size - 8, (2,), generator=gen).tolist()
            vol[j, 0, y:y + 6, x:x + 6] = 500 + 300 * torch.rand(1, generator=gen)
            mask[j, y:y + 6, x:x + 6] = 2
            if torch.rand(1, generator=gen) < 0.012:
                vol[j, 0, 8:20, 8:20] = 4800.0
        yield vol, mask


def main():
    for step, (vol, mask) in enumerate(slices(80, 32, torch.Generator().manual_seed(6)), 1):
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            logits = net(vol / 10.0)
        ce = F.cross_entropy(logits.float(), mask, weight=torch.tensor([0.3, 1.0, 2.0]))
        opt.zero_grad()
        scaler.scale(ce).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 16 == 0:
            print(step, f"{ce.item():.4f}", scaler.get_scale())


torch.manual_seed(0)
torch.set_num_threads(1)
net = SegNet()
MODULES = [net]
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80)
scaler = torch.amp.GradScaler("cpu", init_scale=2 ** 10)
watch(*MODULES)
main()
