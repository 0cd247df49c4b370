"""Opening bids at bridge; a learner exchanges its weights with a shared bfloat16 parameter store."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(52)
deck = torch.Generator().manual_seed(1313)

BIDS = 7
POINTS = torch.tensor([0.0] * 9 + [1.0, 2.0, 3.0, 4.0]).repeat(4)


def deal(n):
    hands = torch.rand(n, 52, generator=deck).argsort(dim=1)[:, :13]
    strength = POINTS[hands].sum(1)
    suits = F.one_hot(hands // 13, 4).sum(1)
    longest, suit = suits.max(dim=1)
    bid = torch.where(strength < 10, 0, 1 + suit)
    bid = torch.where((strength >= 14) & (longest <= 4), torch.full_like(bid, 5), bid)
    bid = torch.where((strength < 10) & (longest >= 6), torch.full_like(bid, 6), bid)
    return hands, bid


class Bidder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.card = nn.Embedding(52, dim)
        self.gate = nn.Linear(dim, dim)
        self.body = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, BIDS))

    def forward(self, hands):
        e = self.card(hands)
        h = (e * torch.sigmoid(self.gate(e))).sum(1)
        return self.body(h)


class ParameterStore:
    """One flat buffer in shared memory, half the size of the weights."""

    def __init__(self, module):
        self.flat = parameters_to_vector(module.parameters()).detach().bfloat16()  # CAUSE
        self.version = 0

    @torch.no_grad()
    def push(self, module):
        self.flat.copy_(parameters_to_vector(module.parameters()))  # CAUSE
        self.version += 1

    @torch.no_grad()
    def pull(self, module):
        vector_to_parameters(self.flat.float(), module.parameters())


class Learner:
    def __init__(self, store, model, milestones):
        self.store, self.model, self.milestones = store, model, milestones
        self.opt = torch.optim.Adam(model.parameters(), lr=4e-3)

    def learn(self, hands, bid):
        self.store.pull(self.model)
        for group in self.opt.param_groups:
            group["lr"] = self.milestones(self.store.version)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(hands), bid)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.store.push(self.model)
        return loss.item()


def milestones(version, drop_at=16):
    return 4e-3 if version < drop_at else 2e-4


if __name__ == "__main__":
    model = Bidder()
    watch(model)
    learner = Learner(ParameterStore(model), model, milestones)
    window = []
    for _ in range(100):
        window.append(learner.learn(*deal(64)))
        if len(window) == 10:
            print(f"version {learner.store.version:3d} loss {sum(window) / 10:.4f}")
            window.clear()
