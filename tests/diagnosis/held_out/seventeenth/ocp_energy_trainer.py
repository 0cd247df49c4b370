"""Adsorption energies from small graphs: the energy trainer's loop, which keeps running means of its metrics."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(41)


class CGCNN(nn.Module):
    def __init__(self, elements=8, d=48, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(elements, d)
        self.convs = nn.ModuleList(nn.Linear(2 * d + 8, 2 * d) for _ in range(layers))
        self.fc = nn.Sequential(nn.Linear(d, d), nn.Softplus(), nn.Linear(d, 1))

    def forward(self, batch):
        z, pos = batch["atomic_numbers"], batch["pos"]
        h = self.embedding(z)
        dist = (pos.unsqueeze(2) - pos.unsqueeze(1)).pow(2).sum(-1).sqrt()
        rbf = torch.exp(-2.0 * (dist.unsqueeze(-1) - torch.linspace(0.5, 4, 8)) ** 2)
        n = z.size(1)
        for conv in self.convs:
            pair = torch.cat([h.unsqueeze(2).expand(-1, -1, n, -1), h.unsqueeze(1).expand(-1, n, -1, -1), rbf], -1)
            gate, core = conv(pair).chunk(2, -1)
            h = h + (torch.sigmoid(gate) * F.softplus(core)).mean(2)
        return self.fc(h.mean(1)).squeeze(-1)


class Evaluator:
    def update(self, name, value, metrics):
        total, count = metrics.get(name, (0.0, 0))
        metrics[name] = (total + value, count + 1)
        return metrics


def load_batches(gen, n=24, atoms=6):
    table = torch.linspace(-1, 1, 8)
    while True:
        z = torch.randint(0, 8, (n, atoms), generator=gen)
        pos = 3 * torch.rand(n, atoms, 3, generator=gen)
        dist = (pos.unsqueeze(2) - pos.unsqueeze(1)).pow(2).sum(-1).sqrt()
        energy = (table[z].unsqueeze(2) * table[z].unsqueeze(1) * torch.exp(-dist)).sum((1, 2)) + 2 * table[z].sum(1)
        yield {"atomic_numbers": z, "pos": pos, "y": energy}


class EnergyTrainer:
    def __init__(self, model, max_steps=90, print_every=10):
        self.model, self.max_steps, self.print_every = model, max_steps, print_every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=15)
        self.evaluator, self.metrics = Evaluator(), {}

    def _forward(self, batch):
        return {"energy": self.model(batch)}

    def _compute_loss(self, out, batch):
        return F.l1_loss(out["energy"].float(), batch["y"])

    def _backward(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, loader):
        for step in range(self.max_steps):
            batch = next(loader)
            with torch.autocast("cpu", dtype=torch.float16):
                out = self._forward(batch)
                loss = self._compute_loss(out, batch)
            mae = (out["energy"].detach().float() - batch["y"]).abs().mean().item()
            loss = self.scaler.scale(loss)
            self._backward(loss)
            scale = self.scaler.get_scale()  # CAUSE
            self.metrics = self.evaluator.update("energy_mae", mae, self.metrics)
            self.metrics = self.evaluator.update("loss", loss.item() / scale, self.metrics)  # CAUSE
            if (step + 1) % self.print_every == 0:
                log = {k: total / count for k, (total, count) in self.metrics.items()}
                print(", ".join(f"{k}: {v:.4f}" for k, v in log.items()) + f", step: {step + 1}, scale: {scale:g}")
                self.metrics = {}


model = CGCNN()
watch(model)
EnergyTrainer(model).train(load_batches(torch.Generator().manual_seed(42)))
