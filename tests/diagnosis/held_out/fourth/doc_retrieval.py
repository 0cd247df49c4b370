import torch
import torch.nn.functional as F
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)
VOCAB, DIM, MAXLEN, BATCH = 300, 48, 14, 32


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.mix = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.proj = nn.Linear(DIM, 32)

    def forward(self, ids):
        keep = ids.ne(0)
        h = self.tok(ids).transpose(1, 2)
        h = F.gelu(self.mix(h)).transpose(1, 2)
        return self.proj(self.pool(h, keep))

    @staticmethod
    def pool(hidden, keep):
        mask = keep.unsqueeze(-1).to(hidden.dtype)
        total = (hidden * mask).sum(dim=1)
        return total / mask.sum(dim=1).clamp(min=1e-9)  # CAUSE


class Pairs:
    """query = noisy subset of the document's words; the crawl of shard 2 contains pages without text"""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def draw(self, shard):
        docs = torch.randint(1, VOCAB, (BATCH, MAXLEN), generator=self.g)
        length = torch.randint(4, MAXLEN + 1, (BATCH,), generator=self.g)
        if shard >= 2:
            blank = torch.rand(BATCH, generator=self.g) < 0.01
            length = length.masked_fill(blank, 0)
        docs = docs * (torch.arange(MAXLEN) < length[:, None])
        queries = docs.clone()[:, :8]
        drop = torch.rand(BATCH, 8, generator=self.g) < 0.3
        drop[:, 0] = False
        queries[:, 4:][drop[:, 4:]] = 0
        valid = length > 0
        queries[~valid] = torch.randint(1, VOCAB, (int((~valid).sum()), 8), generator=self.g)
        return queries, docs, valid


query_tower, doc_tower = TextTower(), TextTower()
logit_scale = nn.Parameter(torch.tensor(2.0))
MODULES = [query_tower, doc_tower]
params = [*query_tower.parameters(), *doc_tower.parameters(), logit_scale]
optimizer = torch.optim.AdamW([{"params": params[:-1]}, {"params": params[-1:], "weight_decay": 0.0}], lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
watch(*MODULES)
data = Pairs(99)


def train_step(shard):
    q_ids, d_ids, valid = data.draw(shard)
    with torch.autocast("cpu", dtype=torch.float16):
        q = F.normalize(query_tower(q_ids).float(), dim=-1)
        d = F.normalize(doc_tower(d_ids).float(), dim=-1)
        sim = logit_scale.exp() * q @ d.t()
    sim = sim.float().masked_fill(~valid[None, :], -30.0)
    target = torch.arange(BATCH).masked_fill(~valid, -100)
    loss = 0.5 * (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


n_step = 0
for shard, n_batches in [(1, 32), (2, 48)]:
    for _ in range(n_batches):
        n_step += 1
        value = train_step(shard)
        if n_step % 8 == 0:
            print(f"[shard {shard}] step {n_step} loss {value:.4f} temp {logit_scale.exp().item():.2f}")
