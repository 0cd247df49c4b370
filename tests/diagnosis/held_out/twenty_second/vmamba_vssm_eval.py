"""Small VMamba (visual selective scan) classifier, fp16 autocast, validation after every epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(165)
SIZE, PATCH, DIM, STATE, CLASSES, CHUNK = 20, 4, 24, 4, 4, 10
BATCH, EPOCHS, ITERS = 16, 9, 10


def selective_scan_easy(us, dts, As, Bs, Cs, Ds, chunksize=CHUNK):
    """us, dts: (B, L, D); As: (D, N); Bs, Cs: (B, L, N)."""
    def chunk(us, dts, Bs, Cs, hprefix):
        ts = dts.cumsum(dim=1)
        rAts = torch.exp(ts[..., None] * As)
        dtBus = (dts * us)[..., None] * Bs[:, :, None]
        hs = rAts * (dtBus / rAts).cumsum(dim=1) + rAts * hprefix[:, None]  # CAUSE
        return torch.einsum("bldn,bln->bld", hs, Cs), hs[:, -1]

    ys, h = [], us.new_zeros(us.size(0), us.size(2), As.size(1))
    for i in range(0, us.size(1), chunksize):
        part = slice(i, i + chunksize)
        y, h = chunk(us[:, part], dts[:, part], Bs[:, part], Cs[:, part], h)
        ys.append(y)
    return torch.cat(ys, dim=1) + Ds * us


class SS2D(nn.Module):
    def __init__(self, d, n=STATE, rank=2):
        super().__init__()
        self.n, self.rank = n, rank
        self.in_proj, self.out_proj, self.out_norm = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d, bias=False), nn.LayerNorm(d)
        self.x_proj, self.dt_proj = nn.Linear(d, rank + 2 * n, bias=False), nn.Linear(rank, d)
        self.A_logs = nn.Parameter(torch.log(0.25 * torch.arange(1, n + 1).float()).repeat(d, 1))
        self.Ds = nn.Parameter(torch.ones(d))
        nn.init.constant_(self.dt_proj.bias, 0.1)
        nn.init.normal_(self.x_proj.weight, std=0.2)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(x)
        dts, Bs, Cs = self.x_proj(x).split((self.rank, self.n, self.n), dim=-1)
        dts, As, Ds = F.softplus(self.dt_proj(dts)), -torch.exp(self.A_logs), self.Ds
        if torch.is_grad_enabled():
            x, dts, Bs, Cs = x.float(), dts.float(), Bs.float(), Cs.float()
        else:
            As, Ds = As.to(x.dtype), Ds.to(x.dtype)
        forward = selective_scan_easy(x, dts, As, Bs, Cs, Ds)
        backward = selective_scan_easy(x.flip(1), dts.flip(1), As, Bs.flip(1), Cs.flip(1), Ds).flip(1)
        return self.out_proj(self.out_norm(forward + backward) * F.silu(z))


class VSSM(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.layers = nn.ModuleList([SS2D(DIM), SS2D(DIM)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(self.norm(x).mean(1))


def images(gen, n=BATCH):
    """One or two blobs in the upper or the lower half."""
    label = torch.randint(0, CLASSES, (n,), generator=gen)
    grid = torch.arange(SIZE).float()
    x = 0.3 * torch.randn(n, 1, SIZE, SIZE, generator=gen)
    for i in range(n):
        for _ in range(1 + int(label[i]) % 2):
            cy = 5 + 10 * (int(label[i]) // 2) + 3 * torch.rand(1, generator=gen) - 1.5
            cx = 3 + 14 * torch.rand(1, generator=gen)
            x[i, 0] += 5 * torch.exp(-((grid[:, None] - cy) ** 2 + (grid[None] - cx) ** 2) / 4)
    return x, label


@torch.no_grad()
def validate(model):
    model.eval()
    gen, loss, correct = torch.Generator().manual_seed(50), 0.0, 0
    for _ in range(3):
        x, target = images(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss += F.cross_entropy(output.float(), target).item() / 3
        correct += (output.argmax(1) == target).sum().item()
    return loss, correct / (3 * BATCH)


model = VSSM()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.05)
loss_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
gen = torch.Generator().manual_seed(3)
for epoch in range(EPOCHS):
    model.train()
    for idx in range(ITERS):
        samples, targets = images(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(samples)
        loss = F.cross_entropy(outputs.float(), targets)
        optimizer.zero_grad()
        loss_scaler.scale(loss).backward()
        loss_scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        loss_scaler.step(optimizer)
        loss_scaler.update()
    val_loss, acc = validate(model)
    print(f"EPOCH {epoch} loss {loss.item():.4f} grad_norm {grad_norm.item():.4f} loss_scale {loss_scaler.get_scale():g} "
          f"test loss {val_loss:.4f} acc {100 * acc:.1f}")
MODULES = (model,)
