"""Two-view supervised contrastive pre-training of a small encoder with mixed precision."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(100)
CLASSES, PIXELS, FEAT_DIM, BATCH = 6, 48, 32, 24


class SupConLoss(nn.Module):
    """Supervised contrastive loss over all views of a batch."""

    def __init__(self, temperature=0.07, base_temperature=0.07):
        super().__init__()
        self.temperature, self.base_temperature = temperature, base_temperature

    def forward(self, features, labels):
        batch_size, views = features.shape[:2]
        labels = labels.view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
        anchor_dot_contrast = torch.div(contrast_feature @ contrast_feature.T, self.temperature)
        logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
        logits = anchor_dot_contrast - logits_max.detach()
        mask = mask.repeat(views, views)
        logits_mask = torch.ones_like(mask).fill_diagonal_(0)
        mask = mask * logits_mask
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))  # CAUSE
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
        loss = -(self.temperature / self.base_temperature) * mean_log_prob_pos
        return loss.view(views, batch_size).mean()


class SupConNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, FEAT_DIM))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.kaiming_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.head(self.encoder(x))  # CAUSE


class TwoCropTransform:
    """Two random augmentations of the same image: crop-like dropout of pixels, brightness, noise."""

    def __init__(self, gen):
        self.gen = gen

    def augment(self, x):
        keep = (torch.rand(x.shape, generator=self.gen) < 0.85).float()
        bright = 1 + 0.2 * torch.randn(len(x), 1, generator=self.gen)
        return x * keep * bright + 0.2 * torch.randn(x.shape, generator=self.gen)

    def __call__(self, x):
        return [self.augment(x), self.augment(x)]


class AverageMeter:
    def __init__(self):
        self.val = self.sum = self.count = 0

    def update(self, val, n):
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def set_loader(gen, n_batches):
    prototypes = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(7)) * 0.5
    transform = TwoCropTransform(gen)
    for _ in range(n_batches):
        labels = torch.arange(BATCH) % CLASSES
        images = prototypes[labels] + 0.3 * torch.randn(BATCH, PIXELS, generator=gen)
        yield transform(images), labels


model, criterion = SupConNet(), SupConLoss(temperature=0.07)
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
gen = torch.Generator().manual_seed(1)
losses = AverageMeter()

for idx, (images, labels) in enumerate(set_loader(gen, 80)):
    bsz = labels.shape[0]
    images = torch.cat([images[0], images[1]], dim=0)
    with torch.autocast("cpu", dtype=torch.float16):
        features = model(images)
    f1, f2 = torch.split(features.float(), [bsz, bsz], dim=0)
    features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
    loss = criterion(features, labels)
    losses.update(loss.item(), bsz)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if (idx + 1) % 8 == 0:
        print(f"Train: [{idx + 1}/80]\tloss {losses.val:.3f} ({losses.avg:.3f})\tscale {scaler.get_scale():g}")

MODULES = (model,)
