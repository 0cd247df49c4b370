import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)
g = torch.Generator().manual_seed(170)
QUEUE, DIM = 128, 24


def encoder():
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, DIM))


class Contrast(nn.Module):
    def __init__(self, momentum=0.9998):
        super().__init__()
        self.query = encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, DIM, generator=g), dim=1))
        self.ptr = 0

    @torch.no_grad()
    def momentum_update(self):
        for pq, pk in zip(self.query.parameters(), self.key.parameters()):
            pk.data.mul_(self.momentum).add_(pq.data, alpha=1 - self.momentum)  # CAUSE

    @torch.no_grad()
    def enqueue(self, k):
        n = k.shape[0]
        self.queue[self.ptr:self.ptr + n] = k
        self.ptr = (self.ptr + n) % QUEUE

    def forward(self, xq, xk):
        q = F.normalize(self.query(xq).float(), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = F.normalize(self.key(xk).float(), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.float().clone().T
        logits = torch.cat([pos, neg], 1) / 0.2
        self.enqueue(k.to(self.queue.dtype))
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


model = Contrast().bfloat16()
MODULES = [model]
watch(*MODULES)
start = [p.detach().float().clone() for p in model.key.parameters()]
opt = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9)
centers = torch.randn(12, 40, generator=g)
for it in range(80):
    c = centers[torch.randint(0, 12, (16,), generator=g)]
    views = [(c + 0.5 * torch.randn(16, 40, generator=g)).to(next(model.parameters()).dtype) for _ in range(2)]
    loss = model(*views)
    opt.zero_grad()
    loss.backward()
    opt.step()
moved = sum((a - p.float()).norm() for a, p in zip(start, model.key.parameters()))
gap = sum((q.float() - p.float()).norm() for q, p in zip(model.query.parameters(), model.key.parameters()))
print("loss", loss.item(), "key encoder moved", moved.item(), "gap", gap.item())
