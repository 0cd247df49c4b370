"""Next-state emulator for gridded weather fields: encoder, mixing blocks, AdamW with weight decay, clipped gradients."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(141)

conf = {
    "trainer": {"amp": True, "grad_max_norm": 1.0, "batches_per_epoch": 20, "epochs": 5, "learning_rate": 3e-3,
                "weight_decay": 1e-2, "train_batch_size": 8},
    "model": {"levels": 4, "lat": 8, "lon": 12, "dim": 32, "depth": 2},
    "loss": {"latitude_weights": True},
}


class Block(nn.Module):
    def __init__(self, dim, tokens):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.ff1, self.ff2 = nn.Linear(tokens, tokens), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff2(F.gelu(self.ff1(self.n2(x))))


class Emulator(nn.Module):
    def __init__(self, levels, lat, lon, dim, depth):
        super().__init__()
        self.patch, self.lat, self.lon, self.levels = 2, lat, lon, levels
        tokens = lat * lon // 4
        self.embed = nn.Linear(4 * levels, dim)
        self.blocks = nn.Sequential(*(Block(dim, tokens) for _ in range(depth)))
        self.head = nn.Linear(dim, 4 * levels)

    def forward(self, x):
        b = x.size(0)
        cells = x.view(b, self.levels, self.lat // 2, 2, self.lon // 2, 2).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        y = self.head(self.blocks(self.embed(cells)))
        y = y.view(b, self.lat // 2, self.lon // 2, self.levels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return x + y.reshape(x.shape)


class Reanalysis:
    """Waves that travel eastward, faster aloft, and tilt with height; normalised per level."""

    def __init__(self, m, seed=5):
        self.m, self.gen = m, torch.Generator().manual_seed(seed)
        self.x = torch.arange(m["lon"]) * (2 * math.pi / m["lon"])
        self.envelope = torch.cos(torch.linspace(-1.3, 1.3, m["lat"]))[:, None]

    def sample(self, n):
        k = torch.randint(1, 4, (n, 1, 1, 1), generator=self.gen).float()
        phase = torch.rand(n, 1, 1, 1, generator=self.gen) * 2 * math.pi
        level = torch.arange(self.m["levels"]).view(1, -1, 1, 1).float()
        amp = 0.5 + torch.rand(n, 1, 1, 1, generator=self.gen)

        def field(t):
            return amp * self.envelope * torch.sin(k * self.x - (0.3 + 0.2 * level) * t + phase + 0.4 * level)
        noise = 0.05 * torch.randn(n, self.m["levels"], self.m["lat"], self.m["lon"], generator=self.gen)
        return field(0.0) + noise, field(1.5)


class Trainer:
    def __init__(self, model, optimizer, scaler, criterion):
        self.model, self.optimizer, self.scaler, self.criterion = model, optimizer, scaler, criterion

    def train_one_epoch(self, epoch, conf, data):
        results = {"train_loss": [], "train_mae": []}
        for _ in range(conf["trainer"]["batches_per_epoch"]):
            x, y = data.sample(conf["trainer"]["train_batch_size"])
            with torch.autocast("cpu", dtype=torch.float16, enabled=conf["trainer"]["amp"]):
                y_pred = self.model(x)
                loss = self.criterion(y.float(), y_pred.float())
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=conf["trainer"]["grad_max_norm"])  # CAUSE
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            results["train_loss"].append(loss.item())
            results["train_mae"].append((y - y_pred.detach().float()).abs().mean().item())
        n = len(results["train_loss"])
        print(f"Epoch: {epoch} train_loss: {sum(results['train_loss']) / n:.6f} train_mae: {sum(results['train_mae']) / n:.6f} "
              f"scale: {self.scaler.get_scale():g}")
        return results


def latitude_weighted_mse(lat):
    weights = torch.cos(torch.linspace(-1.3, 1.3, lat))
    weights = (weights / weights.mean())[:, None]
    return lambda target, pred: (weights * (target - pred) ** 2).mean()


model = Emulator(**conf["model"])
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=conf["trainer"]["learning_rate"],
                              weight_decay=conf["trainer"]["weight_decay"], betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=20, enabled=conf["trainer"]["amp"])
trainer = Trainer(model, optimizer, scaler, latitude_weighted_mse(conf["model"]["lat"]))
data = Reanalysis(conf["model"])
for epoch in range(conf["trainer"]["epochs"]):
    trainer.train_one_epoch(epoch, conf, data)

MODULES = (model,)
