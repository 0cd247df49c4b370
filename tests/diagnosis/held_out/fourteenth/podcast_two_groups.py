"""Next-episode prediction; the show table is frozen for the first 30 steps and has its own optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)

SHOWS, TOPICS, HISTORY = 200, 8, 10


class Listeners:
    def __init__(self, seed):
        self.r = torch.Generator().manual_seed(seed)
        self.topic = torch.randint(0, TOPICS, (SHOWS,), generator=self.r)
        self.by_topic = [torch.nonzero(self.topic == t).flatten() for t in range(TOPICS)]

    def sessions(self, n):
        first = torch.randint(0, TOPICS, (n,), generator=self.r)
        rows = []
        for t in first.tolist():
            pool = self.by_topic[t]
            other = self.by_topic[(t + 1) % TOPICS]
            a = pool[torch.randint(0, len(pool), (HISTORY - 3,), generator=self.r)]
            b = other[torch.randint(0, len(other), (3,), generator=self.r)]
            rows.append(torch.cat([a, b]))
        return torch.stack(rows), (first + 2) % TOPICS


class EpisodeModel(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.table = nn.Embedding(SHOWS, dim)
        self.query = nn.Linear(dim, dim)
        self.tower = nn.Sequential(nn.Linear(2 * dim, 96), nn.ReLU(), nn.Linear(96, TOPICS))

    def forward(self, shows):
        e = self.table(shows)
        att = torch.softmax((self.query(e[:, -1:]) * e).sum(-1) / 7, dim=1)
        return self.tower(torch.cat([(att.unsqueeze(-1) * e).sum(1), e.mean(1)], dim=1))


def optimizers(model):
    dense = [p for n, p in model.named_parameters() if not n.startswith("table")]
    opt_dense = torch.optim.SGD(dense, lr=0.1, momentum=0.9)
    opt_table = torch.optim.SGD(model.table.parameters(), lr=2.0, momentum=0.9)
    return opt_dense, opt_table


def train(steps=95, thaw=30, max_norm=1.0):
    listeners, model = Listeners(seed=6), EpisodeModel()
    watch(model)
    opt_dense, opt_table = optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=400)
    model.table.requires_grad_(False)
    losses = []
    for step in range(steps):
        if step == thaw:
            model.table.requires_grad_(True)
        shows, target = listeners.sessions(64)
        active = [opt_dense, opt_table] if step >= thaw else [opt_dense]
        for opt in active:
            opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(shows), target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt_dense)  # CAUSE
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # CAUSE
        for opt in active:
            scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step:2d} loss {sum(losses[-10:]) / 10:.4f}")


train()
