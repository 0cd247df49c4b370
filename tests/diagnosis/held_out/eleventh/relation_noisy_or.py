"""Document-level relation extraction: mention pairs, and a noisy-OR over the pairs of two entities."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(41)
DIM, MENTIONS, ENTITIES = 32, 12, 4


class PairScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
        self.subject, self.object = nn.Linear(64, 32), nn.Linear(64, 32)
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, mentions):
        h = F.gelu(self.encoder(mentions))
        s, o = self.subject(h), self.object(h)
        return torch.einsum("bid,bjd->bij", s, o) / 32 ** 0.5 + self.bias


def entity_probability(pair_logits, entity_of):
    """P(at least one mention pair of the entity pair holds)."""
    b, m, _ = pair_logits.shape
    prob = torch.sigmoid(pair_logits).clamp(max=1.0 - 1e-6)  # CAUSE
    log_none = torch.log1p(-prob)
    slot = entity_of[:, :, None] * ENTITIES + entity_of[:, None, :]
    total = log_none.new_zeros(b, ENTITIES * ENTITIES)
    total = total.scatter_add(1, slot.flatten(1), log_none.flatten(1))
    return 1.0 - torch.exp(total)


def documents(n, generator):
    """Mentions of entity e carry its code; the relation holds between e and e + 1."""
    codes = torch.randn(ENTITIES, DIM, generator=torch.Generator().manual_seed(3)) * 1.5
    while True:
        entity_of = torch.randint(0, ENTITIES, (n, MENTIONS), generator=generator)
        x = codes[entity_of] + 0.3 * torch.randn(n, MENTIONS, DIM, generator=generator)
        gold = (entity_of[:, None, :] == (entity_of[:, :, None] + 1) % ENTITIES).float()
        yield x, entity_of, gold


def train(steps=90, consistency=0.1):
    model = PairScorer()
    watch(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    stream = documents(8, torch.Generator().manual_seed(8))
    skipped = 0
    for step in range(steps):
        x, entity_of, gold = next(stream)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            marginal = entity_probability(logits, entity_of)
        slot = entity_of[:, :, None] * ENTITIES + entity_of[:, None, :]
        wanted = torch.zeros(len(x), ENTITIES * ENTITIES).scatter_reduce(
            1, slot.flatten(1), gold.flatten(1), "amax")
        pair_loss = F.binary_cross_entropy_with_logits(logits.float(), gold)
        loss = pair_loss + consistency * F.mse_loss(marginal.float(), wanted)
        opt.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        if step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} max logit {logits.max().item():.2f} skipped {skipped}")
    return skipped


if __name__ == "__main__":
    train()
