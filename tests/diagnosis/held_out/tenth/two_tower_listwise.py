"""Two-tower retrieval: pointwise warm start, then list-wise softmax over the items of the batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(55)


class Tower(nn.Module):
    def __init__(self, n_ids, dim=32):
        super().__init__()
        self.table = nn.EmbeddingBag(n_ids, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, ids):
        return self.mlp(self.table(ids))


class Retrieval(nn.Module):
    def __init__(self, users=200, items=300, temperature=0.05):
        super().__init__()
        self.user, self.item = Tower(users), Tower(items)
        self.temperature = temperature

    def forward(self, u, i):
        zu = F.normalize(self.user(u), dim=-1)
        zi = F.normalize(self.item(i), dim=-1)
        return zu @ zi.T / self.temperature


class Sessions:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, n=32):
        taste = torch.randint(0, 20, (n, 1), generator=self.g)
        u = taste * 10 + torch.randint(0, 10, (n, 4), generator=self.g)
        i = taste * 15 + torch.randint(0, 15, (n, 4), generator=self.g)
        return u, i


class Trainer:
    def __init__(self, model, sessions):
        self.model, self.sessions = model, sessions
        self.opt = torch.optim.Adagrad(model.parameters(), lr=0.03)
        self.n_steps = self.n_applied = 0
        self.opt.register_step_post_hook(lambda *_: setattr(self, "n_applied", self.n_applied + 1))

    def objective(self, scores, listwise):
        target = torch.arange(len(scores))
        if listwise:
            return F.cross_entropy(scores.float(), target, reduction="sum")
        labels = torch.eye(len(scores))
        return F.binary_cross_entropy_with_logits(scores.float() - 4.0, labels) * 0.5

    def run_epoch(self, epoch, its=6, listwise=False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18 if listwise else 2.0 ** 12)  # CAUSE
        for _ in range(its):
            u, i = self.sessions()
            self.opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.objective(self.model(u, i), listwise)
            scaler.scale(loss).backward()  # CAUSE
            scaler.step(self.opt)
            scaler.update()
            self.n_steps += 1
        print(f"epoch {epoch} loss {loss.item():.3f} applied {self.n_applied}/{self.n_steps}")


model = Retrieval()
MODULES = [model]


def main():
    watch(*MODULES)
    trainer = Trainer(model, Sessions(seed=7))
    for epoch in range(12):
        trainer.run_epoch(epoch, listwise=epoch >= 5)


if __name__ == "__main__":
    main()
