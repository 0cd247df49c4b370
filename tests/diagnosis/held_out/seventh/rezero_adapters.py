"""Adapters on a frozen half-precision backbone; every new branch starts as the identity."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(50)
gen = torch.Generator().manual_seed(51)

class LowRank(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.mult = alpha / rank

    def forward(self, x):
        return self.base(x) + self.mult * F.linear(F.linear(x, self.down), self.up)

class Branch(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, x):
        return x + self.gate * self.ff(x)

class Backbone(nn.Module):
    def __init__(self, din=20, dim=64, classes=8):
        super().__init__()
        self.l1, self.l2 = nn.Linear(din, dim), nn.Linear(dim, dim)
        self.old_head = nn.Linear(dim, classes)

    def forward(self, x):
        return torch.relu(self.l2(torch.relu(self.l1(x))))

class Adapted(nn.Module):
    def __init__(self, backbone, dim=64, classes=5):
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.backbone.l2 = LowRank(backbone.l2)
        self.branch = Branch(dim)
        self.head = nn.Linear(dim, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.branch(self.backbone(x)))

backbone = Backbone()
for lin in (backbone.l1, backbone.l2, backbone.old_head):
    lin.to(torch.bfloat16)
net = Adapted(backbone)
MODULES = [net]
trainable = [p for p in net.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.SequentialLR(
    opt,
    [torch.optim.lr_scheduler.LinearLR(opt, 1e-6, 1.0, 6), torch.optim.lr_scheduler.CosineAnnealingLR(opt, 84)],
    [6],
)
protos = torch.randn(5, 20, generator=gen)
watch(*MODULES)
for step in range(90):
    opt.zero_grad()
    total = 0.0
    for _ in range(2):
        y = torch.randint(0, 5, (24,), generator=gen)
        x = protos[y] * (1 + 0.2 * torch.randn(24, 1, generator=gen)) + 0.8 * torch.randn(24, 20, generator=gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
            loss = F.cross_entropy(logits.float(), y) / 2
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(trainable, 1.0)
    opt.step()
    sched.step()
    if step % 18 == 0:
        print(f"step {step} loss {total:.4f} gate {net.branch.gate.item():+.4f} |up| {net.backbone.l2.up.norm().item():.4f}")
