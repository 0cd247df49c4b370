"""Land-cover segmentation with an own batch normalisation layer (unbiased moving variance), half-precision activations."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(30230)
SIDE, BATCH, CLASSES, STEPS, EVAL_EVERY = 64, 16, 4, 40, 10


class FusedBatchNorm(nn.Module):
    """Normalises with the moments of the batch; keeps moving averages for inference, with Bessel's correction."""

    def __init__(self, features, momentum=0.1, epsilon=1e-3):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("moving_mean", torch.zeros(features))
        self.register_buffer("moving_variance", torch.ones(features))
        self.momentum, self.epsilon = momentum, epsilon

    def affine(self, x, mean, variance):
        inv = torch.rsqrt(variance + self.epsilon) * self.scale
        shift = self.offset - mean * inv
        return x * inv.to(x.dtype)[:, None, None] + shift.to(x.dtype)[:, None, None]

    def forward(self, x):
        if not self.training:
            return self.affine(x, self.moving_mean, self.moving_variance)
        mean = x.float().mean((0, 2, 3))
        variance = x.float().var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            element_count = torch.tensor(x.numel() // x.size(1)).to(x.dtype)  # CAUSE
            factor = element_count / (element_count - 1)
            self.moving_mean.lerp_(mean, self.momentum)
            self.moving_variance.lerp_(variance * factor, self.momentum)
        return self.affine(x, mean, variance)


class SegNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), FusedBatchNorm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, stride=2, bias=False), FusedBatchNorm(width)
        self.conv3 = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, x):
        a = F.relu(self.bn1(self.conv1(x)))
        b = F.relu(self.bn2(self.conv2(a)))
        return self.conv3(torch.cat((a, F.interpolate(b, scale_factor=2)), dim=1))


class LandCover:
    """Smooth regions of four covers, each with a mean colour, under noise."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(2))

    def batch(self, n=BATCH):
        coarse = torch.randn(n, CLASSES, 6, 6, generator=self.gen)
        labels = F.interpolate(coarse, size=SIDE, mode="bilinear").argmax(1)
        images = self.colours[labels].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, SIDE, SIDE, generator=self.gen)
        return images, labels


@torch.no_grad()
def evaluate(model, data, batches=1):
    model.eval()
    losses, right = [], []
    for _ in range(batches):
        images, labels = data.batch(4)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
        losses.append(F.cross_entropy(logits.float(), labels).item())
        right.append((logits.argmax(1) == labels).float().mean().item())
    model.train()
    return sum(losses) / batches, sum(right) / batches


model = SegNet()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
train_data, val_data = LandCover(1), LandCover(100)
for step in range(STEPS):
    images, labels = train_data.batch()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if (step + 1) % EVAL_EVERY == 0:
        val_loss, val_acc = evaluate(model, val_data)
        print(f"step {step + 1} train loss {loss.item():.4f} val loss {val_loss:.4f} val accuracy {val_acc:.3f}")

MODULES = (model,)
