import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class EMAQuantizer(nn.Module):
    def __init__(self, n_codes=32, dim=16, decay=0.9, eps=1e-4):
        super().__init__()
        self.decay, self.eps = decay, eps
        book = torch.randn(n_codes, dim)
        self.register_buffer("codebook", book)
        self.register_buffer("usage", torch.ones(n_codes))
        self.register_buffer("embed_sum", book.clone())

    def forward(self, z):
        b, c, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, c)
        ref = flat.detach().float()
        d2 = ref.square().sum(1, keepdim=True) - 2 * ref @ self.codebook.t().float() + self.codebook.square().sum(1)  # CAUSE
        idx = d2.argmin(1)
        q = F.embedding(idx, self.codebook).view(b, h, w, c).permute(0, 3, 1, 2)  # CAUSE
        commit = (z.float() - q.detach()).square().mean()
        if self.training:
            self._update(flat.detach(), idx)
        return z + (q - z).detach(), commit, idx

    @torch.no_grad()
    def _update(self, flat, idx):
        onehot = F.one_hot(idx, self.codebook.size(0)).to(flat.dtype)
        self.usage.lerp_(onehot.float().sum(0), 1 - self.decay)
        sums = onehot.t() @ flat  # CAUSE
        self.embed_sum.lerp_(sums.float(), 1 - self.decay)
        n = self.usage.sum()
        smooth = (self.usage + self.eps) / (n + self.codebook.size(0) * self.eps) * n
        self.codebook.copy_(self.embed_sum / smooth[:, None])


class VQAutoencoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, dim, 1))
        self.vq = EMAQuantizer(dim=dim)
        self.dec = nn.Sequential(nn.ConvTranspose2d(dim, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1))

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


class XrayFrames:
    """raw detector frames; exposure time is chosen per series"""

    def __init__(self, gen, size=24):
        self.gen, self.size = gen, size

    def next(self, b=16):
        low = torch.rand(b, 1, 4, 4, generator=self.gen)
        img = F.interpolate(low, size=(self.size, self.size), mode="bilinear")
        exposure = 2.0 + 3.0 * torch.rand(1, generator=self.gen)
        if torch.rand(1, generator=self.gen) < 0.02:
            exposure = exposure * 60
        return exposure * img + 0.05 * torch.randn(img.shape, generator=self.gen)


torch.set_num_threads(1)
torch.manual_seed(21)
net = VQAutoencoder()
MODULES = [net]
optim = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
frames = XrayFrames(torch.Generator().manual_seed(90))
watch(*MODULES)

for it in range(1, 71):
    x = frames.next()
    with torch.autocast("cpu", dtype=torch.float16):
        rec, commit, idx = net(x)
        loss = F.smooth_l1_loss(rec.float(), x) + 0.25 * commit.clamp(max=50.0)
    optim.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    if it % 10 == 0:
        print(f"{it:3d} rec+commit {loss.item():.4f} codes in use {idx.unique().numel()} scale {scaler.get_scale():g}")
