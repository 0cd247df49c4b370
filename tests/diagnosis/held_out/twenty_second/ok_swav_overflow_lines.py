"""SwAV-style clustering of two views with prototypes, fp16 autocast, a message for every skipped update."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(47)
FEATURES, HIDDEN, PROJ, PROTOTYPES, KINDS, BATCH = 24, 48, 16, 12, 6, 48
TEMPERATURE, EPSILON, EPOCHS, ITERS = 0.1, 0.05, 4, 25


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU())
        self.projection_head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PROJ))
        self.prototypes = nn.Linear(PROJ, PROTOTYPES, bias=False)

    def forward(self, inputs):
        x = self.projection_head(self.body(torch.cat(inputs)))
        x = F.normalize(x.float(), dim=1, p=2)
        return x, self.prototypes(x)


@torch.no_grad()
def distributed_sinkhorn(out, iterations=3):
    Q = torch.exp(out / EPSILON).t()
    Q /= Q.sum()
    for _ in range(iterations):
        Q /= Q.sum(dim=1, keepdim=True)
        Q /= PROTOTYPES
        Q /= Q.sum(dim=0, keepdim=True)
        Q /= Q.size(1)
    return (Q * Q.size(1)).t()


class MultiCropDataset:
    """Samples of six clusters; a crop is a sample with noise and with a few features dropped."""

    def __init__(self, seed=31):
        self.gen = torch.Generator().manual_seed(seed)
        self.centres = 1.5 * torch.randn(KINDS, FEATURES, generator=self.gen)

    def crop(self, x):
        keep = torch.rand(x.shape, generator=self.gen) > 0.15
        return (x + 0.5 * torch.randn(x.shape, generator=self.gen)) * keep

    def __iter__(self):
        for _ in range(ITERS):
            kind = torch.randint(0, KINDS, (BATCH,), generator=self.gen)
            x = self.centres[kind] + 0.4 * torch.randn(BATCH, FEATURES, generator=self.gen)
            yield [self.crop(x), self.crop(x)], kind


def purity(assignment, kind):
    table = torch.zeros(PROTOTYPES, KINDS)
    table.index_put_((assignment, kind), torch.ones(len(kind)), accumulate=True)
    return (table.amax(1).sum() / len(kind)).item()


def train(loader, model, optimizer, scaler, epoch):
    losses = []
    for it, (inputs, kind) in enumerate(loader):
        with torch.no_grad():
            w = F.normalize(model.prototypes.weight, dim=1, p=2)
            model.prototypes.weight.copy_(w)
        with torch.autocast("cpu", dtype=torch.float16):
            embedding, output = model(inputs)
        output = output.float()
        loss = 0.0
        for crop_id in range(2):
            q = distributed_sinkhorn(output[BATCH * crop_id:BATCH * (crop_id + 1)].detach())
            other = output[BATCH * (1 - crop_id):BATCH * (2 - crop_id)] / TEMPERATURE
            loss = loss - (q * F.log_softmax(other, dim=1)).sum(1).mean() / 2
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if epoch == 0 and it < 10:
            model.prototypes.weight.grad = None
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            print(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scaler.get_scale()}")
        losses.append(loss.item())
    print(f"Epoch: [{epoch}] Loss {sum(losses) / len(losses):.4f} purity {purity(output[:BATCH].argmax(1), kind):.3f}")


model = Backbone()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 22, growth_interval=15)
for epoch in range(EPOCHS):
    train(MultiCropDataset(), model, optimizer, scaler, epoch)
MODULES = (model,)
