import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(64)


def picture(uv):
    x, y = uv.unbind(-1)
    weave = torch.sin(113 * x) * torch.cos(113 * y)
    return (0.7 * weave + 0.3 * torch.sin(9 * x * y)).unsqueeze(-1)


class DenseGrid(nn.Module):
    """frozen multi-resolution grid baked from a noisy scan, with bilinear look-up"""

    def __init__(self, levels=(8, 24, 72), feats=4):
        super().__init__()
        self.levels = levels
        self.tables = nn.ParameterList()
        for r in levels:
            line = torch.arange(r + 1) / r
            vertex = torch.stack([line.repeat(r + 1), line.repeat_interleave(r + 1)], -1)
            baked = picture(vertex) * torch.randn(1, feats) + 0.05 * torch.randn((r + 1) ** 2, feats)
            self.tables.append(nn.Parameter(baked, requires_grad=False))

    def corner(self, table, r, cx, cy):
        flat = cy * (r + 1) + cx  # CAUSE
        return table[flat.clamp(0, len(table) - 1).long()]

    def forward(self, uv):
        out = []
        for r, table in zip(self.levels, self.tables):
            p = uv * r
            lo = p.floor()
            f = p - lo
            x, y = lo.unbind(-1)
            fx, fy = f[..., :1], f[..., 1:]
            c00, c10 = self.corner(table, r, x, y), self.corner(table, r, x + 1, y)
            c01, c11 = self.corner(table, r, x, y + 1), self.corner(table, r, x + 1, y + 1)
            out.append((c00 * (1 - fx) + c10 * fx) * (1 - fy) + (c01 * (1 - fx) + c11 * fx) * fy)
        return torch.cat(out, -1)


class ImageField(nn.Module):
    def __init__(self):
        super().__init__()
        self.warp = nn.Linear(2, 2)
        with torch.no_grad():
            self.warp.weight.copy_(torch.eye(2))
            self.warp.bias.zero_()
        self.enc = DenseGrid()
        self.mlp = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, uv):
        return self.mlp(self.enc(self.warp(uv).clamp(0, 0.999)))


field = ImageField()
MODULES = [field]
opt = torch.optim.Adam(field.mlp.parameters(), lr=5e-3, betas=(0.9, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
gen = torch.Generator().manual_seed(640)
watch(*MODULES)
for it in range(100):
    uv = torch.rand(2048, 2, generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        rgb = field(uv)
        loss = (rgb.float() - picture(uv)).pow(2).mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 20 == 19:
        print(it, f"psnr {-10 * torch.log10(loss).item():.2f}")
