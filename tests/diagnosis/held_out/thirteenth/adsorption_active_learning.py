"""Active learning of adsorption energies (meV) of alloy sites: fit a small committee, label where it disagrees, repeat."""
from dataclasses import dataclass, field

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)


@dataclass
class Config:
    descriptors: int = 16
    pool: int = 600
    first: int = 96
    query: int = 48
    rounds: int = 6
    steps_per_round: int = 16
    batch: int = 32
    lr: float = 4e-3


class Expert(nn.Module):
    def __init__(self, d, width=48):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        h = torch.nn.functional.softplus(self.a(x))
        h = h + torch.nn.functional.softplus(self.b(h))
        return self.c(h).squeeze(-1)


class Committee(nn.Module):
    def __init__(self, d, members=2):
        super().__init__()
        self.members = nn.ModuleList(Expert(d) for _ in range(members))

    def forward(self, x):
        return torch.stack([m(x) for m in self.members])


@dataclass
class Laboratory:
    """Stands in for the density-functional calculations."""
    cfg: Config
    gen: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(77))

    def __post_init__(self):
        self.x = torch.randn(self.cfg.pool, self.cfg.descriptors, generator=self.gen)
        w = torch.randn(self.cfg.descriptors, generator=self.gen)
        self.y = -450.0 + 160.0 * torch.tanh(self.x @ w / 4) + 60.0 * self.x[:, 0] * self.x[:, 1]
        self.known = torch.randperm(self.cfg.pool, generator=self.gen)[: self.cfg.first].tolist()

    def batches(self):
        known = torch.tensor(self.known)
        for _ in range(self.cfg.steps_per_round):
            rows = known[torch.randint(len(known), (self.cfg.batch,), generator=self.gen)]
            yield self.x[rows], self.y[rows]

    def label(self, score):
        score = score.clone()
        score[self.known] = -1.0
        self.known += score.topk(self.cfg.query).indices.tolist()


def fit(committee, optimizer, lab):
    scaler = torch.amp.GradScaler("cpu")  # CAUSE
    for x, y in lab.batches():
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = committee(x)
        loss = (prediction.float() - y).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(committee.parameters(), 1000.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main():
    cfg = Config()
    lab, committee = Laboratory(cfg), Committee(cfg.descriptors)
    watch(committee)
    optimizer = torch.optim.Adam(committee.parameters(), lr=cfg.lr, betas=(0.9, 0.99))
    for number in range(cfg.rounds):
        loss = fit(committee, optimizer, lab)
        with torch.no_grad():
            votes = committee(lab.x)
        lab.label(votes.std(0))
        rmse = (votes.mean(0) - lab.y).square().mean().sqrt().item()
        print(f"round {number} loss {loss:.0f} rmse {rmse:.1f} meV, {len(lab.known)} labels")


if __name__ == "__main__":
    main()
