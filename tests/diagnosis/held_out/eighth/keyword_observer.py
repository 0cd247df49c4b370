"""Keyword spotting with activation quantisation; the clipping range follows a running RMS."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(15)
gen = torch.Generator().manual_seed(16)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class ActQuant(nn.Module):
    def __init__(self, bits=4, decay=0.95, k=3.0):
        super().__init__()
        self.levels, self.decay, self.k = 2 ** bits - 1, decay, k
        self.register_buffer("running", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                power = (x * x).mean()  # CAUSE
                new = power.float().sqrt()
                self.running.copy_(new if self.seen == 0 else self.decay * self.running + (1 - self.decay) * new)
                self.seen += 1
        if self.seen < 50:
            return x
        step = self.k * self.running / self.levels
        q = RoundSTE.apply((x / step).clamp(0, self.levels))
        return q * step  # CAUSE


class KeywordNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1 = nn.Conv1d(20, 32, 3, padding=1)
        self.quant1 = ActQuant()
        self.norm = nn.LayerNorm(32)
        self.conv2 = nn.Conv1d(32, 32, 3, padding=1)
        self.quant2 = ActQuant()
        self.head = nn.Linear(32, classes)

    def forward(self, mel):
        h = self.quant1(F.relu(self.conv1(mel)))
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        h = self.quant2(F.relu(self.conv2(h)))
        return self.head(h.mean(-1))


PROTO = torch.randn(6, 20, 1, generator=gen)


def mel_batch(i, n=24):
    y = torch.randint(0, 6, (n,), generator=gen)
    gain = torch.rand(n, 1, 1, generator=gen) + 0.5
    if i == 27:
        gain[3] = 400.0
    return (PROTO[y] + 0.8 * torch.randn(n, 20, 30, generator=gen)) * gain, y


net = KeywordNet()
MODULES = [net]


def run(updates=80):
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(*MODULES)
    for i in range(1, updates + 1):
        mel, y = mel_batch(i)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(mel), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if i % 10 == 0 or 25 < i < 29:
            print(f"{i} loss {loss.item():.4f} range {net.quant1.running.item():.3f} scale {scaler.get_scale()}")


run()
