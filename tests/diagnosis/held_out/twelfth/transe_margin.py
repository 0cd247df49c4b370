"""TransE on a toy knowledge graph, margin ranking; many late batches satisfy every margin."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)
ENTITIES, RELATIONS = 24, 2


class TransE(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.entity, self.relation = nn.Embedding(ENTITIES, d), nn.Embedding(RELATIONS, d)
        self.project = nn.Linear(d, d, bias=False)
        nn.init.eye_(self.project.weight)

    def distance(self, h, r, t):
        diff = self.project(self.entity(h)) + self.relation(r) - self.project(self.entity(t))
        return torch.sqrt(diff.float().square().sum(-1) + 1e-6)


def chain_facts():
    """relation k links i to i + hop_k on a chain"""
    hops = [1, 5]
    heads = torch.arange(ENTITIES).repeat(RELATIONS)
    rels = torch.arange(RELATIONS).repeat_interleave(ENTITIES)
    tails = heads + torch.tensor(hops)[rels]
    return torch.stack([heads, rels, tails], 1)[tails < ENTITIES]


def corrupt(triples, g):
    out = triples.clone()
    shift = torch.randint(1, ENTITIES, (len(out),), generator=g)
    out[:, 2] = (out[:, 2] + shift) % ENTITIES
    return out


g = torch.Generator().manual_seed(14)
facts = chain_facts()
model = TransE()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=25)
quiet = 0
for step in range(100):
    good = facts[torch.randint(0, len(facts), (4,), generator=g)]
    bad = corrupt(good, g)
    opt.zero_grad(set_to_none=False)
    with torch.autocast("cpu", dtype=torch.float16):
        gap = 0.1 + model.distance(*good.T) - model.distance(*bad.T)
        loss = torch.relu(gap).mean()
    quiet += int(loss.item() == 0.0)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(f"{step + 1} loss {loss.item():.5f} batches without a violated margin {quiet}")
