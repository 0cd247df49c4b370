"""Sparse convolutional classifier of voxelised shapes, one scene per batch, batch norm over the active sites, fp16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(190)
GRID, CLASSES, ACCUMULATE, UPDATES = 16, 4, 4, 30


class BatchNormalization(nn.Module):
    """Over the active sites of all samples; momentum as in SparseConvNet (share that is kept)."""

    def __init__(self, nPlanes, eps=1e-4, momentum=0.9):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(nPlanes)), nn.Parameter(torch.zeros(nPlanes))
        self.eps, self.momentum = eps, momentum
        self.register_buffer("runningMean", torch.zeros(nPlanes))
        self.register_buffer("runningVar", torch.ones(nPlanes))

    def forward(self, features):
        features = features.float()
        if self.training:
            n = features.new_tensor(float(features.size(0)))
            mean = features.mean(0)
            ssq = (features - mean).pow(2).sum(0)
            invstd = torch.rsqrt(ssq / n + self.eps)
            with torch.no_grad():
                self.runningMean.mul_(self.momentum).add_((1 - self.momentum) * mean)
                self.runningVar.mul_(self.momentum).add_((1 - self.momentum) * (ssq / (n - 1)))  # CAUSE
        else:
            mean, invstd = self.runningMean, torch.rsqrt(self.runningVar + self.eps)
        return F.relu((features - mean) * invstd * self.weight + self.bias)


class SubmanifoldConvolution(nn.Module):
    def __init__(self, nIn, nOut):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, nIn, nOut) * (2.0 / (9 * nIn)) ** 0.5)

    def forward(self, sites, features):
        offsets = sites[None] - sites[:, None]
        out = 0
        for k, (dy, dx) in enumerate((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)):
            rule = ((offsets[..., 0] == dy) & (offsets[..., 1] == dx)).to(features.dtype)
            out = out + (rule @ features) @ self.weight[k]
        return out


class MaxPooling(nn.Module):
    def forward(self, sites, features):
        coarse, index = torch.unique(sites // 4, dim=0, return_inverse=True)
        pooled = torch.stack([features[index == i].amax(0) for i in range(len(coarse))])
        return coarse, pooled


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = SubmanifoldConvolution(1, 12), BatchNormalization(12)
        self.c2, self.b2 = SubmanifoldConvolution(12, 24), BatchNormalization(24)
        self.pool, self.c3, self.b3 = MaxPooling(), SubmanifoldConvolution(24, 24), BatchNormalization(24)
        self.linear = nn.Linear(72, CLASSES)

    def forward(self, sites):
        x = self.b1(self.c1(sites, torch.ones(len(sites), 1)))
        x = self.b2(self.c2(sites, x))
        fine = torch.cat((x.mean(0), x.amax(0)))
        sites, x = self.pool(sites, x)
        x = self.b3(self.c3(sites, x))
        return self.linear(torch.cat((fine, x.mean(0)))[None])


def scene(gen):
    """A line, a cross, a frame or a filled square, of random size and place."""
    label = int(torch.randint(0, CLASSES, (1,), generator=gen))
    size = int(torch.randint(3, 12, (1,), generator=gen))
    y, x = torch.randint(0, GRID - size + 1, (2,), generator=gen).tolist()
    shape = torch.zeros(size, size)
    if label == 0:
        shape[size // 2] = 1
    elif label == 1:
        shape[size // 2], shape[:, size // 2] = 1, 1
    elif label == 2:
        shape[0], shape[-1], shape[:, 0], shape[:, -1] = 1, 1, 1, 1
    else:
        shape[:] = 1
    return shape.nonzero() + torch.tensor([y, x]), torch.tensor([label])


def iou_evaluate(model, n=60):
    model.eval()
    gen, correct = torch.Generator().manual_seed(99), 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for _ in range(n):
            sites, label = scene(gen)
            logits = model(sites).float()
            correct += int(logits.argmax(1).item() == label.item() and logits.isfinite().all())
    model.train()
    return correct / n, logits.abs().max().item()


model = Model()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
gen = torch.Generator().manual_seed(6)
for update in range(UPDATES):
    optimizer.zero_grad()
    train_loss = 0.0
    for _ in range(ACCUMULATE):
        sites, label = scene(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(sites).float(), label) / ACCUMULATE
        scaler.scale(loss).backward()
        train_loss += loss.item()
    scaler.step(optimizer)
    scaler.update()
    if (update + 1) % 5 == 0:
        accuracy, largest = iou_evaluate(model)
        print(f"update {update + 1} train loss {train_loss:.4f} test accuracy {accuracy:.3f} largest logit {largest:.3f}")
MODULES = (model,)
