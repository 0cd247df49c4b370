"""E(n)-equivariant denoiser of small conformers in padded batches."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(9)
MAX_ATOMS, TYPES, HIDDEN = 7, 5, 32


class EquivariantLayer(nn.Module):
    def __init__(self, h=HIDDEN):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * h + 1, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(2 * h, h), nn.SiLU(), nn.Linear(h, h))
        self.coord = nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1, bias=False))

    def forward(self, h, x, pair_mask):
        n = h.size(1)
        rel = x[:, :, None] - x[:, None]
        dist = rel.square().sum(-1, keepdim=True)
        dist = torch.where(pair_mask, dist, torch.ones_like(dist)).sqrt()  # CAUSE
        left, right = h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)
        m = self.edge(torch.cat([left, right, dist.to(h.dtype)], -1)) * pair_mask
        x = x + (rel / (dist + 1.0) * torch.tanh(self.coord(m).float()) * pair_mask).sum(2) / n
        return h + self.node(torch.cat([h, m.sum(2)], -1)), x


class Denoiser(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(TYPES, HIDDEN)
        self.layers = nn.ModuleList([EquivariantLayer() for _ in range(depth)])
        self.inputs = nn.Parameter(torch.ones(3))

    def forward(self, types, x, mask):
        pair_mask = (mask[:, :, None] & mask[:, None]) & ~torch.eye(MAX_ATOMS, dtype=torch.bool)
        h, x = self.embed(types), x * self.inputs.mean()
        for layer in self.layers:
            h, x = layer(h, x, pair_mask[..., None])
        return x


class Conformers(torch.utils.data.IterableDataset):
    """Coordinates are kept to one decimal, as in the text files of the original release."""

    def __init__(self, batch=10, noise=0.3, seed=20):
        self.batch, self.noise, self.seed = batch, noise, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            size = torch.randint(3, MAX_ATOMS + 1, (self.batch, 1), generator=g)
            mask = torch.arange(MAX_ATOMS) < size
            types = torch.randint(0, TYPES, (self.batch, MAX_ATOMS), generator=g)
            step = torch.randn(self.batch, MAX_ATOMS, 3, generator=g)
            clean = 0.8 * (step / step.norm(dim=-1, keepdim=True)).cumsum(1)
            noisy = clean + self.noise * torch.randn(clean.shape, generator=g)
            noisy = (noisy * 10).round() / 10 * mask[..., None]
            yield types, noisy, clean, mask


def aligned_error(pred, clean, mask):
    w = mask[..., None].float()
    pred = pred - (pred * w).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    clean = clean - (clean * w).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    return ((pred - clean).square() * w).sum() / w.sum()


def main():
    model = Denoiser()
    watch(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    loader = iter(torch.utils.data.DataLoader(Conformers(), batch_size=None))
    for step in range(80):
        types, noisy, clean, mask = next(loader)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(types, noisy, mask)
        loss = aligned_error(pred.float(), clean, mask)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0 or not norm.isfinite():
            print(f"{step:3d} loss {loss.item():.4f} norm {norm.item():.3f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
