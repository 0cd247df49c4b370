import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(9)


class FastSigmoidSpike(torch.autograd.Function):
    SLOPE = 100.0

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad):
        u, = ctx.saved_tensors
        return grad / (FastSigmoidSpike.SLOPE * u.abs() + 1.0) ** 2  # CAUSE


spike = FastSigmoidSpike.apply
AUX = 0.001                                     # weight of the spiking head among the other tasks


class LIF(nn.Module):
    def __init__(self, n_in, n_out, beta=0.9):
        super().__init__()
        self.fc = nn.Linear(n_in, n_out)
        self.beta = beta

    def forward(self, x, mem):
        mem = self.beta * mem + self.fc(x)
        s = spike(mem - 1.0)
        return s, mem - s.detach()


class SpikingNet(nn.Module):
    def __init__(self, n_in=20, hidden=64, classes=4):
        super().__init__()
        self.l1, self.l2 = LIF(n_in, hidden), LIF(hidden, hidden)
        self.readout = nn.Linear(hidden, classes)

    def forward(self, x):
        m1 = m2 = 0.0
        total = 0.0
        for frame in x.unbind(1):
            s1, m1 = self.l1(frame, m1)
            s2, m2 = self.l2(s1, m2)
            total = total + self.readout(s2).float()
        return total / x.size(1)


def events(g, n=128, steps=10):
    y = torch.randint(0, 4, (n,), generator=g)
    rate = torch.full((n, 20), 0.15)
    rate.scatter_(1, (y[:, None] * 5 + torch.arange(5)), 0.8)
    x = (torch.rand(n, steps, 20, generator=g) < rate[:, None]).float()
    return 2.0 * x, y


g = torch.Generator().manual_seed(90)
snn = SpikingNet()
snn.readout.requires_grad_(False)               # fixed random readout
MODULES = [snn]
opt = torch.optim.SGD(snn.parameters(), lr=20000.0)
watch(*MODULES)
for it in range(50):
    x, y = events(g)
    with torch.autocast("cpu", dtype=torch.float16):
        out = snn(x)
    loss = AUX * F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 9:
        print(it, loss.item(), (out.argmax(1) == y).float().mean().item())
