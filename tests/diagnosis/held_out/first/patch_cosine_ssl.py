"""BYOL/SimSiam-like pretraining of patch tokens: cosine between online and target tokens."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(64)
EPS = 1e-8


def unit(v):
    return v / (v.norm(dim=-1, keepdim=True) + EPS)  # CAUSE


class PatchNet(nn.Module):
    def __init__(self, patch=4, width=64, out=32):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width, bias=False)
        self.fc1 = nn.Linear(width, width, bias=False)
        self.fc2 = nn.Linear(width, out, bias=False)

    def forward(self, img):
        p = F.unfold(img, self.patch, stride=self.patch).transpose(1, 2)
        h = F.relu(self.embed(p))
        h = h + F.relu(self.fc1(h))
        return self.fc2(h)


def augment(img, gen):
    gain = 0.7 + 0.6 * torch.rand(img.size(0), 1, 1, 1, generator=gen)
    return img * gain + 0.02 * img * torch.randn(img.shape, generator=gen)


def photos(gen, b=12, size=16):
    low = torch.randn(b, 3, 4, 4, generator=gen)
    img = F.interpolate(low, size=(size, size), mode="bilinear") + 0.1 * torch.randn(b, 3, size, size, generator=gen)
    # portrait photos arrive letter-boxed: the bars are exactly zero
    tall = torch.rand(b, generator=gen) < 0.004
    img[tall, :, :, :4] = 0
    img[tall, :, :, -4:] = 0
    return img


online = PatchNet()
predictor = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 32, bias=False))
target = copy.deepcopy(online).requires_grad_(False)
MODULES = [online, predictor, target]
groups = [{"params": online.parameters()}, {"params": predictor.parameters(), "lr": 2e-2}]
sgd = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
amp_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
watch(*MODULES)

gen = torch.Generator().manual_seed(7)
for epoch in range(5):
    total = 0.0
    for _ in range(16):
        img = photos(gen)
        v1, v2 = augment(img, gen), augment(img, gen)
        with torch.autocast("cpu", dtype=torch.float16):
            p1, p2 = unit(predictor(online(v1))), unit(predictor(online(v2)))
            with torch.no_grad():
                t1, t2 = unit(target(v1)), unit(target(v2))
            loss = 2 - (p1 * t2).sum(-1).mean() - (p2 * t1).sum(-1).mean()
        sgd.zero_grad(set_to_none=True)
        amp_scaler.scale(loss).backward()
        amp_scaler.step(sgd)
        amp_scaler.update()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters()):
                t.mul_(0.97).add_(o, alpha=0.03)
        total += loss.item() / 16
    print(f"epoch {epoch}: mean loss {total:.5f}")
