"""Parameter-efficient tuning of a frozen patch transformer with (IA)^3 rescaling vectors, everything in bfloat16."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class IA3Linear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.rescale = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x):
        return self.base(x) * self.rescale


class Block(nn.Module):
    def __init__(self, d=48, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 96), nn.Linear(96, d)

    def forward(self, x):
        h = self.n1(x)
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q(h)), split(self.k(h)), split(self.v(h)))
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class PatchTransformer(nn.Module):
    def __init__(self, classes=6, d=48):
        super().__init__()
        self.patch = nn.Linear(16, d)
        self.pos = nn.Parameter(0.2 * torch.randn(16, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.head = nn.Linear(d, classes)

    def forward(self, img):
        x = self.patch(F.unfold(img, 4, stride=4).transpose(1, 2)) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean(1))


def inject_ia3(model):
    model.requires_grad_(False)
    for blk in model.blocks:
        for name in ("k", "v", "down"):
            setattr(blk, name, IA3Linear(getattr(blk, name)))
    model.head = IA3Linear(model.head)
    return [p for p in model.parameters() if p.requires_grad]


def task(gen, protos, n=48):
    y = torch.randint(0, len(protos), (n,), generator=gen)
    return protos[y] + 0.4 * torch.randn(n, 1, 16, 16, generator=gen), y


torch.set_num_threads(1)
torch.manual_seed(61)
net = PatchTransformer()
with torch.no_grad():
    net.head.weight.mul_(6.0)
trainable = inject_ia3(net)
net.to(torch.bfloat16)
MODULES = [net]
optimizer = torch.optim.AdamW(trainable, lr=1.5e-3, weight_decay=0.0)
watch(*MODULES)
gen = torch.Generator().manual_seed(9)
protos = torch.randn(6, 1, 16, 16, generator=gen)

window = []
for step in range(1, 101):
    img, y = task(gen, protos)
    loss = F.cross_entropy(net(img.to(net.pos.dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()  # CAUSE
    window.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {sum(window[-20:]) / 20:.4f} grad {sum(p.grad.norm() for p in trainable):.4f}")
