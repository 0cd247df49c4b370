"""Small vision transformer for classification, images and parameters in a 16-bit type, Adam with a cosine schedule."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(41)


def get_config():
    return dict(num_classes=8, res=16, patch=4, width=48, depth=2, heads=4, mlp_dim=96, batch_size=24, total_steps=110,
                warmup_steps=10, lr=6e-4, wd=1e-4, grad_clip_norm=1.0, param_dtype=torch.bfloat16)


class MlpBlock(nn.Module):
    def __init__(self, width, mlp_dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp_dim), nn.Linear(mlp_dim, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Encoder1DBlock(nn.Module):
    def __init__(self, width, heads, mlp_dim):
        super().__init__()
        self.ln1, self.ln2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), MlpBlock(width, mlp_dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (z.view(b, n, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch, n = cfg["patch"], (cfg["res"] // cfg["patch"]) ** 2
        self.embedding = nn.Linear(3 * cfg["patch"] ** 2, cfg["width"])
        self.pos_embedding = nn.Parameter(torch.randn(1, n, cfg["width"]) / math.sqrt(cfg["width"]))
        self.blocks = nn.Sequential(*(Encoder1DBlock(cfg["width"], cfg["heads"], cfg["mlp_dim"]) for _ in range(cfg["depth"])))
        self.norm, self.head = nn.LayerNorm(cfg["width"]), nn.Linear(cfg["width"], cfg["num_classes"])

    def forward(self, image):
        p = self.patch
        x = F.unfold(image.float(), p, stride=p).transpose(1, 2).to(image.dtype)
        x = self.blocks(self.embedding(x) + self.pos_embedding)
        return self.head(self.norm(x).mean(dim=1))


class Images:
    """Classes differ in how colour blobs lie to each other; position of the whole and contrast vary."""

    def __init__(self, cfg, seed):
        self.cfg, self.gen = cfg, torch.Generator().manual_seed(seed)
        g = torch.Generator().manual_seed(40)
        self.templates = F.interpolate(torch.randn(cfg["num_classes"], 3, 5, 5, generator=g), size=cfg["res"], mode="bilinear")

    def batch(self):
        n = self.cfg["batch_size"]
        labels = torch.randint(0, self.cfg["num_classes"], (n,), generator=self.gen)
        shifts = torch.randint(0, 4, (n, 2), generator=self.gen).tolist()
        image = torch.stack([self.templates[y].roll(tuple(s), (1, 2)) for y, s in zip(labels, shifts)])
        image = image * (0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=self.gen))
        return {"image": image + 0.5 * torch.randn(image.shape, generator=self.gen), "labels": labels}


def schedule(cfg, step):
    if step < cfg["warmup_steps"]:
        return (step + 1) / cfg["warmup_steps"]
    t = (step - cfg["warmup_steps"]) / (cfg["total_steps"] - cfg["warmup_steps"])
    return 0.55 + 0.45 * math.cos(math.pi * t)


cfg = get_config()
model = ViT(cfg).to(cfg["param_dtype"])  # CAUSE
watch(model)
opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.999), weight_decay=cfg["wd"])  # CAUSE
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: schedule(cfg, s))
train_ds, measurements = Images(cfg, 1), []
for step in range(cfg["total_steps"]):
    batch = train_ds.batch()
    logits = model(batch["image"].to(cfg["param_dtype"]))
    loss = F.cross_entropy(logits.float(), batch["labels"])
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), cfg["grad_clip_norm"])
    opt.step()
    sched.step()
    measurements.append((loss.item(), (logits.argmax(1) == batch["labels"]).float().mean().item()))
    if (step + 1) % 10 == 0:
        l, a = (sum(v) / 10 for v in zip(*measurements[-10:]))
        l2 = math.sqrt(sum((p.detach().float() ** 2).sum().item() for p in model.parameters()))
        print(f"[{step + 1}] training_loss = {l:.4f} prec@1 = {a:.3f} l2_params = {l2:.5f}")

MODULES = (model,)
