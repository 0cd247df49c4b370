"""Tag recipes from bags of ingredients. Sparse table and dense tower have their own optimizer and schedule."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class Bag(nn.Module):
    def __init__(self, n_items, dim):
        super().__init__()
        self.table = nn.EmbeddingBag(n_items, dim, mode="mean")
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, items, offsets):
        return self.proj(self.table(items, offsets))


class Tower(nn.Module):
    def __init__(self, dim, tags):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.LeakyReLU(0.1), nn.Dropout(0.1), nn.Linear(64, tags))

    def forward(self, v):
        return self.net(v)


class RecipeTrainer:
    def __init__(self, bag, tower, steps=80):
        self.bag, self.tower, self.steps = bag, tower, steps
        self.optims = [
            torch.optim.Adam(tower.parameters(), lr=2e-3),
            torch.optim.SGD(bag.parameters(), lr=8.0, momentum=0.9),
        ]
        self.scheds = [torch.optim.lr_scheduler.StepLR(o, 60, 0.5) for o in self.optims]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11, growth_interval=1000)
        self.gen = torch.Generator().manual_seed(40)
        self.affinity = torch.randn(200, 15, generator=self.gen)

    def batch(self, n=64):
        lens = torch.randint(4, 9, (n,), generator=self.gen)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)[:-1]])
        items = torch.randint(0, 200, (int(lens.sum()),), generator=self.gen)
        pooled = F.embedding_bag(items, self.affinity, offsets, mode="sum")
        return items, offsets, (pooled > 1.0).float()

    def optimizer_phase(self):
        for o in self.optims:
            self.scaler.unscale_(o)
            nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 5.0)
        for o, s in zip(self.optims, self.scheds):
            self.scaler.step(o)
            self.scaler.update()  # CAUSE
            s.step()

    def fit(self):
        history = []
        for it in range(self.steps):
            items, offsets, tags = self.batch()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = self.tower(self.bag(items, offsets))
                loss = F.binary_cross_entropy_with_logits(logits, tags)
            for o in self.optims:
                o.zero_grad()
            self.scaler.scale(loss).backward()
            self.optimizer_phase()
            history.append(loss.item())
            if it % 20 == 19:
                hit = ((logits > 0) == (tags > 0.5)).float().mean().item()
                print(f"it {it + 1} bce {sum(history[-20:]) / 20:.4f} hit {hit:.3f}")
        return history


torch.manual_seed(4)
bag, tower = Bag(200, 32), Tower(32, 15)
MODULES = [bag, tower]
watch(*MODULES)
RecipeTrainer(bag, tower).fit()
