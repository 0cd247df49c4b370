import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)


class TopKCompressor:
    """sends only the largest entries of a gradient, keeps the rest for the next round (EF-SGD)"""

    def __init__(self, ratio=0.1):
        self.ratio = ratio
        self.memory = {}

    def compensate(self, name, grad):
        if name in self.memory:
            grad = grad + self.memory[name]  # CAUSE
        return grad

    def compress(self, name, grad):
        flat = grad.flatten()
        k = max(1, int(flat.numel() * self.ratio))
        idx = flat.abs().topk(k).indices
        sent = torch.zeros_like(flat)
        sent[idx] = flat[idx]
        sent = sent.view_as(grad)
        self.memory[name] = grad - sent  # CAUSE
        return sent


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=8, feat=6, dim=24, classes=4):
        super().__init__()
        self.stem = nn.Linear(feat, dim)
        self.layers = nn.Sequential(*[MixerLayer(tokens, dim) for _ in range(2)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean(1))


gen = torch.Generator().manual_seed(8)
proj = torch.randn(48, 4, generator=gen)
net = Mixer()
MODULES = [net]
workers = [TopKCompressor(), TopKCompressor()]
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=8)
watch(*MODULES)

for rnd in range(80):
    opt.zero_grad()
    received = {}
    for comp in workers:
        x = torch.randn(32, 8, 6, generator=gen)
        y = (x.flatten(1) @ proj).argmax(1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x).float(), y) / len(workers)
        grads = torch.autograd.grad(scaler.scale(loss), list(net.parameters()))
        for (name, _), g in zip(net.named_parameters(), grads):
            g = comp.compensate(name, g / scaler.get_scale())
            received[name] = received.get(name, 0) + comp.compress(name, g)
    for name, p in net.named_parameters():
        p.grad = received[name] * scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if rnd % 20 == 0:
        print(rnd, loss.item(), scaler.get_scale())
