import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def conv_block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.GELU(), nn.AvgPool2d(2))


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(conv_block(1, 16), conv_block(16, 24), nn.Flatten(), nn.Linear(24 * 9, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.enc(x)


def episode_loss(net, xs, ys, xq, yq, ways):
    z = net(torch.cat([xs, xq])).float()
    zs, zq = z[: len(xs)], z[len(xs):]
    logits = torch.full((len(xq), ways), float("-inf"))
    for c in range(ways):
        members = ys == c
        if members.any():
            proto = zs[members].mean(0)
            logits[:, c] = -net.scale.float().exp() * (zq - proto).pow(2).sum(1) / 16
    seen = torch.isfinite(logits.detach()).any(0)
    ok = seen[yq]                           # queries of classes without a support example are left out
    if not ok.any():
        return None, 0
    return nn.functional.cross_entropy(logits[ok], yq[ok]), (logits[ok].argmax(1) == yq[ok]).float().mean().item()


class Glyphs:
    """12x12 drawings, each class is a noisy template; unbalanced support sets"""

    def __init__(self, n_classes, gen):
        self.gen = gen
        self.templates = (torch.rand(n_classes, 1, 12, 12, generator=gen) < 0.3).float()

    def draw(self, labels):
        return self.templates[labels] * (0.6 + 0.4 * torch.rand(len(labels), 1, 1, 1, generator=self.gen)) + 0.3 * torch.randn(len(labels), 1, 12, 12, generator=self.gen)

    def episode(self, ways=5, support=7, query=10):
        classes = torch.randperm(len(self.templates), generator=self.gen)[:ways]
        ys = torch.randint(0, ways, (support,), generator=self.gen)
        yq = torch.randint(0, ways, (query,), generator=self.gen)
        if torch.rand((), generator=self.gen) < 0.06:      # some episodes share no class between the two sets
            ys, yq = ys.clamp(max=1), yq.clamp(min=2)
        return self.draw(classes[ys]), ys, self.draw(classes[yq]), yq


torch.set_num_threads(1)
torch.manual_seed(27)
gen = torch.Generator().manual_seed(272)
net = Embedder()
MODULES = [net]
watch(*MODULES)
glyphs = Glyphs(30, gen)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=100)
empty, acc = 0, []
for ep in range(100):
    xs, ys, xq, yq = glyphs.episode()
    with torch.autocast("cpu", dtype=torch.float16):
        loss, a = episode_loss(net, xs, ys, xq, yq, 5)
    if loss is None:
        empty += 1
        continue
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    acc.append(a)
    if ep % 10 == 9:
        print(f"episode {ep + 1} loss {loss.item():.4f} acc {sum(acc[-10:]) / len(acc[-10:]):.3f} empty {empty}")
