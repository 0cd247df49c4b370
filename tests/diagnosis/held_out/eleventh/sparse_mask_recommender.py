"""Two-tower recommender with a fixed sparse mask on the hidden layers and frozen popular items."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
USERS, ITEMS, DIM = 120, 80, 24


class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.table = nn.Embedding(count, DIM, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)).float(), dim=-1, eps=1e-4)


class SparseMask:
    """Keeps the largest `density` of each hidden matrix, and holds the others at zero."""

    def __init__(self, modules, density=0.3):
        self.masks = []
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    w = layer.weight
                    k = int(w.numel() * (1 - density))
                    mask = (w.abs() > w.abs().flatten().kthvalue(k).values).float()
                    self.masks.append((w, mask))
        self.weights()

    def gradients(self):
        for w, mask in self.masks:
            w.grad.mul_(mask)

    @torch.no_grad()
    def weights(self):
        for w, mask in self.masks:
            w.mul_(mask)


def clicks(n, generator):
    user = torch.randint(1, USERS, (n,), generator=generator)
    item = 1 + (user * 7 + torch.randint(0, 3, (n,), generator=generator)) % (ITEMS - 1)
    return user, item


def in_batch_softmax(u, v, item, temperature=0.1):
    scores = u @ v.T / temperature
    same = item[:, None] == item[None, :]
    scores = scores.float().masked_fill(same & ~torch.eye(len(item), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(item)))


def main(steps=90, frozen_items=12):
    torch.manual_seed(44)
    user_tower, item_tower = Tower(USERS), Tower(ITEMS)
    watch(user_tower, item_tower)
    keep = torch.ones(ITEMS, 1)
    keep[:frozen_items] = 0
    item_tower.table.weight.register_hook(lambda grad: grad * keep)
    mask = SparseMask([user_tower, item_tower])
    params = [*user_tower.parameters(), *item_tower.parameters()]
    optimizer = torch.optim.Adam(params, lr=8e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18, growth_interval=20)
    generator = torch.Generator().manual_seed(55)
    for step in range(steps):
        user, item = clicks(40, generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = in_batch_softmax(user_tower(user), item_tower(item), item)
        scaler.scale(loss).backward()
        mask.gradients()
        scaler.step(optimizer)
        scaler.update()
        mask.weights()
        if step % 15 == 0:
            alive = sum(int((w != 0).sum()) for w, _ in mask.masks) / sum(w.numel() for w, _ in mask.masks)
            print(f"{step:3d} loss {loss.item():.4f} density {alive:.2f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
