"""Item vectors from shopping baskets (skip-gram with negatives, pairs weighted by the units sold). The tables have sparse gradients and their own
SparseAdam; a small projection of item attributes is dense."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)

ITEMS, ATTRS, DIM, NEGATIVES, BATCH = 300, 12, 32, 5, 128


class Baskets:
    def __init__(self, seed=1, aisles=20):
        self.gen = torch.Generator().manual_seed(seed)
        self.aisle = torch.arange(ITEMS) % aisles
        self.attrs = F.one_hot(self.aisle % ATTRS, ATTRS).float() + 0.2 * torch.randn(ITEMS, ATTRS, generator=self.gen)
        self.members = [torch.nonzero(self.aisle == a).squeeze(1) for a in range(aisles)]

    def pairs(self):
        centre = torch.randint(ITEMS, (BATCH,), generator=self.gen)
        near = torch.stack([m[torch.randint(len(m), (1,), generator=self.gen)].squeeze(0)
                            for m in (self.members[a] for a in self.aisle[centre].tolist())])
        units = 1.0 + torch.poisson(torch.full((BATCH,), 1.5), generator=self.gen)
        if torch.rand((), generator=self.gen) < 0.03:
            units[torch.randint(BATCH, (1,), generator=self.gen)] = 1440.0
        return centre, near, torch.randint(ITEMS, (BATCH, NEGATIVES), generator=self.gen), units


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Embedding(ITEMS, DIM, sparse=True)
        self.context = nn.Embedding(ITEMS, DIM, sparse=True)
        self.attributes = nn.Sequential(nn.Linear(ATTRS, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.mix = nn.Linear(2 * DIM, DIM)
        nn.init.normal_(self.centre.weight, std=0.3)
        nn.init.normal_(self.context.weight, std=0.3)

    def forward(self, centre, attrs, others):
        query = self.mix(torch.cat([self.centre(centre), self.attributes(attrs)], -1))
        return torch.bmm(self.context(others), query.unsqueeze(2)).squeeze(2)


baskets = Baskets()
model = SkipGram()
watch(model)
tables = [model.centre.weight, model.context.weight]
dense = [p for p in model.parameters() if all(p is not t for t in tables)]
sparse_opt = torch.optim.SparseAdam(tables, lr=1e-2)
dense_opt = torch.optim.AdamW(dense, lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=40)

for it in range(90):
    centre, near, negative, units = baskets.pairs()
    others = torch.cat([near[:, None], negative], 1)
    target = torch.zeros(BATCH, 1 + NEGATIVES)
    target[:, 0] = 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        score = model(centre, baskets.attrs[centre], others)
    each = F.binary_cross_entropy_with_logits(score.float(), target, reduction="none").sum(1)
    loss = (each * units).mean()

    sparse_opt.zero_grad(set_to_none=True)
    dense_opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    sparse_opt.step()  # CAUSE
    scaler.step(dense_opt)
    scaler.update()
    if it % 10 == 9:
        print(f"{it:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")
