"""Swapped prediction of prototypes from two views (SwAV style), mixed precision with a dynamic loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(47)
FEATURES, HIDDEN, OUTPUT, PROTOTYPES, BATCH = 24, 56, 16, 10, 48


class MultiPrototypeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU())
        self.projection_head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUT))
        self.prototypes = nn.Linear(OUTPUT, PROTOTYPES, bias=False)

    def forward(self, x):
        z = F.normalize(self.projection_head(self.backbone(x)).float(), dim=1)
        return z, self.prototypes(z)


@torch.no_grad()
def sinkhorn(scores, epsilon=0.05, iterations=3):
    q = torch.exp((scores.float() - scores.float().max()) / epsilon).t()
    q /= q.sum()
    for _ in range(iterations):
        q /= q.sum(dim=1, keepdim=True) * q.size(0)
        q /= q.sum(dim=0, keepdim=True) * q.size(1)
    return (q * q.size(1)).t()


class MultiViewDataset:
    """Points of ten clusters, seen twice with noise and dropped features."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.centres = 1.5 * torch.randn(10, FEATURES, generator=self.gen)

    def view(self, x):
        keep = (torch.rand(x.shape, generator=self.gen) < 0.85).float()
        return (x + 0.3 * torch.randn(x.shape, generator=self.gen)) * keep

    def batch(self):
        kind = torch.randint(0, 10, (BATCH,), generator=self.gen)
        x = self.centres[kind] + 0.4 * torch.randn(BATCH, FEATURES, generator=self.gen)
        return [self.view(x), self.view(x)]


class LossScaler:
    """Reports like the older mixed-precision package does."""

    def __init__(self, growth_interval):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=growth_interval)

    def backward_and_step(self, loss, optimizer, before_step):
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        before_step()
        old = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < old:
            print(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {self.scaler.get_scale()}")


def train(loader, model, optimizer, amp, epoch, lr_schedule, iters=15, temperature=0.1):
    def cancel_prototype_gradient():
        if epoch == 0 and it < 5:
            model.prototypes.weight.grad = None

    mean = 0.0
    for it in range(iters):
        optimizer.param_groups[0]["lr"] = lr_schedule[epoch * iters + it]
        with torch.no_grad():
            model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
        views = loader.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = [model(v)[1] for v in views]
        loss = 0.0
        for a, b in ((0, 1), (1, 0)):
            code = sinkhorn(scores[a].detach())
            loss = loss - 0.5 * (code * F.log_softmax(scores[b].float() / temperature, dim=1)).sum(1).mean()
        amp.backward_and_step(loss, optimizer, cancel_prototype_gradient)
        losses.append(loss.item())
        mean += loss.item() / iters
    print(f"Epoch: [{epoch}]\tLoss {mean:.4f}\tLr {optimizer.param_groups[0]['lr']:.4f}")


losses = []
model = MultiPrototypeNet()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
lr_schedule = torch.cat((torch.linspace(0.02, 0.2, 15), 0.1 + 0.1 * torch.cos(torch.linspace(0, 3.1, 75)))).tolist()
loader, amp = MultiViewDataset(seed=5), LossScaler(growth_interval=16)
for epoch in range(6):
    train(loader, model, optimizer, amp, epoch, lr_schedule)
MODULES = (model,)
