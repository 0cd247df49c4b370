import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(42)
N_USERS, N_ITEMS, DIM, N_NEG = 200, 300, 24, 40


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.emb = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, ids):
        return self.mlp(self.emb(ids))


class SampledSoftmax(nn.Module):
    """in-batch items plus uniform extras, corrected with the log of the streaming frequency estimate"""

    def __init__(self, item_freq, temperature=0.2):
        super().__init__()
        self.register_buffer("item_freq", item_freq)
        self.temperature = temperature

    def forward(self, u, pos_vec, neg_vec, pos_ids, neg_ids):
        logits = u @ torch.cat([pos_vec, neg_vec]).t() / self.temperature
        ids = torch.cat([pos_ids, neg_ids])
        q = self.item_freq[ids].to(logits.dtype)  # CAUSE
        logits = logits - q.log()
        same = pos_ids[:, None] == ids[None, :]
        same[torch.arange(len(pos_ids)), torch.arange(len(pos_ids))] = False
        logits = logits.masked_fill(same, -1e4)
        return F.cross_entropy(logits, torch.arange(len(pos_ids)))


gen = torch.Generator().manual_seed(4242)
# impressions of the last quarter; new releases have hardly been shown
impressions = 4e8 * torch.arange(1, N_ITEMS + 1).float().pow(-1.1)
released_today = torch.tensor([211, 254, 290])
impressions[released_today] = 3.0
item_freq = impressions / impressions.sum()
taste = torch.randint(0, 10, (N_USERS,), generator=gen)
genre = torch.randint(0, 10, (N_ITEMS,), generator=gen)
popularity = torch.arange(1, N_ITEMS + 1).float().pow(-0.5)


def clicks(bs):
    users = torch.randint(0, N_USERS, (bs,), generator=gen)
    w = popularity[None, :] * torch.where(taste[users][:, None] == genre[None, :], 8.0, 1.0)
    return users, torch.multinomial(w, 1, generator=gen).squeeze(1)


user_tower, item_tower = Tower(N_USERS, DIM), Tower(N_ITEMS, DIM)
criterion = SampledSoftmax(item_freq)
MODULES = [user_tower, item_tower, criterion]
watch(*MODULES)
params = [*user_tower.parameters(), *item_tower.parameters()]
opt = torch.optim.AdamW(params, lr=4e-3, weight_decay=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=50)

for step in range(1, 71):
    users, items = clicks(32)
    negs = torch.randint(0, 200 if step <= 18 else N_ITEMS, (N_NEG,), generator=gen)
    items = items.clamp(max=199) if step <= 18 else items
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        u = user_tower(users)
        v = item_tower(torch.cat([items, negs]))
        loss = criterion(u, v[:32], v[32:], items, negs)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 5 == 0:
        with torch.no_grad():
            score = user_tower(users) @ item_tower(torch.arange(N_ITEMS)).t()
            rank = (score > score.gather(1, items[:, None])).sum(1).float().mean()
        print(f"step {step:3d} loss {loss.item():.4f} mean rank {rank:.1f}")
