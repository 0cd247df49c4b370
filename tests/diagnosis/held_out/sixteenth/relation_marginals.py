"""Joint extraction of entities and relations: pair scores must agree with the scores of their heads."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)

WORDS, LENGTH, MARKER = 80, 14, 78


def marginal_pair_consistency_loss(pair_logits, heads, pair_mask, head_logits, head_mask):
    """The chance that a word heads any relation, from its pairs, against the head scorer."""
    probabilities = pair_logits.sigmoid()
    log_survival = torch.log1p(-probabilities.clamp(max=1.0 - 1e-6))  # CAUSE
    log_survival = log_survival * pair_mask.to(log_survival.dtype)
    total = torch.zeros_like(head_logits).scatter_add_(1, heads, log_survival)
    marginal = 1.0 - torch.exp(total)
    error = (marginal - head_logits.sigmoid()) ** 2
    return (error * head_mask).sum() / head_mask.sum().clamp(min=1)


class BoundaryModel(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed = nn.Embedding(WORDS, d)
        self.encoder = nn.GRU(d, d // 2, batch_first=True, bidirectional=True)
        self.head_scorer = nn.Linear(d, 1)
        self.pair_scorer = nn.Sequential(nn.Linear(3 * d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, ids, heads, tails):
        h, _ = self.encoder(self.embed(ids))
        pick = lambda index: h.gather(1, index.unsqueeze(-1).expand(-1, -1, h.size(-1)))
        a, b = pick(heads), pick(tails)
        return self.head_scorer(h).squeeze(-1), self.pair_scorer(torch.cat([a, b, a * b], -1)).squeeze(-1)


def sentences(gen, n=24, pairs=12):
    """A word is the head of a relation with the next one if the marker stands behind both; some pairs are padding."""
    ids = torch.randint(1, 78, (n, LENGTH), generator=gen)
    spot = torch.randint(0, LENGTH - 3, (n,), generator=gen)
    ids[torch.arange(n), spot + 2] = MARKER
    heads = torch.randint(0, LENGTH, (n, pairs), generator=gen)
    tails = torch.randint(0, LENGTH, (n, pairs), generator=gen)
    heads[:, 0], tails[:, 0] = spot, spot + 1
    labels = ((heads == spot[:, None]) & (tails == spot[:, None] + 1)).float()
    pair_mask = torch.arange(pairs) < torch.randint(6, pairs + 1, (n, 1), generator=gen)
    head_labels = torch.zeros(n, LENGTH).scatter_(1, spot[:, None], 1.0)
    return ids, heads, tails, labels, pair_mask, head_labels


def compute_loss(model, batch, consistency_loss_weight=0.1):
    ids, heads, tails, labels, pair_mask, head_labels = batch
    head_logits, pair_logits = model(ids, heads, tails)
    head_mask = torch.ones_like(head_labels)
    loss_heads = F.binary_cross_entropy_with_logits(head_logits.float(), head_labels)
    per_pair = F.binary_cross_entropy_with_logits(pair_logits.float(), labels, reduction="none")
    loss_pairs = (per_pair * pair_mask).sum() / pair_mask.sum()
    consistency = marginal_pair_consistency_loss(pair_logits, heads, pair_mask, head_logits, head_mask)
    return loss_heads + loss_pairs + consistency_loss_weight * consistency.float()


def main(steps=90):
    model = BoundaryModel()
    watch(model)
    optimizer = torch.optim.AdamW([{"params": list(model.embed.parameters()) + list(model.encoder.parameters()), "lr": 6e-3},
                                   {"params": list(model.head_scorer.parameters()) + list(model.pair_scorer.parameters()),
                                    "lr": 1e-2}], weight_decay=0.01)
    gen = torch.Generator().manual_seed(3)
    for step in range(steps):
        batch = sentences(gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.3f}")


if __name__ == "__main__":
    main()
