"""Item embeddings of a small recommender in half precision, trained with the Adan optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1790)
USERS, ITEMS, DIM, DTYPE = 60, 120, 24, torch.float16


class Adan(torch.optim.Optimizer):
    """Adaptive Nesterov momentum; states have the type of the parameters."""

    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if not state:
                    state["step"], state["g"] = 0, g.clone()
                    for name in ("m", "v", "n"):
                        state[name] = torch.zeros_like(p)
                diff = g - state["g"]
                state["step"] += 1
                state["m"].lerp_(g, 1 - b1)
                state["v"].lerp_(diff, 1 - b2)
                state["n"].lerp_((g + b2 * diff) ** 2, 1 - b3)
                c1, c2, c3 = (1 - b ** state["step"] for b in (b1, b2, b3))
                denom = (state["n"] / c3).sqrt() + group["eps"]  # CAUSE
                update = (state["m"] / c1 + b2 * state["v"] / c2) / denom
                p.sub_(group["lr"] * update).div_(1 + group["lr"] * group["weight_decay"])
                state["g"].copy_(g)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_embedding, self.item_embedding = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.user_tower = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))
        self.log_temperature = nn.Parameter(torch.tensor(0.7))
        for emb in (self.user_embedding, self.item_embedding):
            nn.init.normal_(emb.weight, std=0.3)

    def forward(self, users, items):
        u = F.normalize(self.user_tower(self.user_embedding(users)).float(), dim=-1)
        v = F.normalize(self.item_tower(self.item_embedding(items)).float(), dim=-1)
        return u @ v.t() * self.log_temperature.float().exp() * 2


def interactions(n=3000, seed=3):
    """Users buy items of their taste; popular items are bought far more often than others."""
    gen = torch.Generator().manual_seed(seed)
    taste, kind = torch.randint(0, 6, (USERS,), generator=gen), torch.randint(0, 6, (ITEMS,), generator=gen)
    popularity = 1.0 / (1 + torch.randperm(ITEMS, generator=gen).float())
    users = torch.randint(0, USERS, (n,), generator=gen)
    weight = popularity * torch.where(kind[None] == taste[users][:, None], 1.0, 0.01)
    return users, torch.multinomial(weight, 1, generator=gen).squeeze(1), popularity


def batches(epochs, batch_size, seed=8):
    users, items, popularity = interactions()
    gen = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(users), generator=gen).split(batch_size):
            yield users[index], items[index], popularity


def train(epochs=4, batch_size=100, loss_scale=64.0):
    model = TwoTower().to(DTYPE)
    watch(model)
    optimizer = Adan(model.parameters(), lr=4e-3)
    losses = []
    for step, (users, items, popularity) in enumerate(batches(epochs, batch_size)):
        unique, target = items.unique(return_inverse=True)
        scores = model(users, unique) - 0.3 * popularity[unique].log()
        loss = F.cross_entropy(scores, target)
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 15 == 0:
            hit = (scores.argmax(1) == target).float().mean().item()
            print(f"step {step + 1} loss {losses[-1]:.4f} hit rate {hit:.3f}")
    return model, losses


model, losses = train()
MODULES = (model,)
