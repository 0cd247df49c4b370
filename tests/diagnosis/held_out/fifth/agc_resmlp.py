import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)


def unitwise_norm(x):
    if x.ndim <= 1:
        return x.norm(2)
    return x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


@torch.no_grad()
def adaptive_clip_grad(parameters, clip_factor=0.05, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        max_norm = unitwise_norm(p).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unitwise_norm(p.grad)
        clipped = p.grad * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.copy_(torch.where(grad_norm < max_norm, p.grad, clipped))  # CAUSE


class NFBlock(nn.Module):
    def __init__(self, ch, alpha=0.2):
        super().__init__()
        self.c1 = nn.Conv1d(ch, ch, 5, padding=2)
        self.c2 = nn.Conv1d(ch, ch, 5, padding=2)
        self.gain = nn.Parameter(torch.ones(()))
        self.alpha = alpha

    def forward(self, x):
        return x + self.alpha * self.gain * self.c2(nn.functional.gelu(self.c1(nn.functional.gelu(x))))


class ECGNet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.stem = nn.Conv1d(2, ch, 7, stride=2, padding=3)
        self.body = nn.Sequential(NFBlock(ch), NFBlock(ch))
        self.head = nn.Linear(ch, 1)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean(-1)).squeeze(-1)


class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
        self.gen = torch.Generator().manual_seed(99)

    def batch(self):
        rate = torch.rand(16, generator=self.gen) * 2 + 0.5
        t = torch.linspace(0, 6.28, 64)
        x = torch.sin(rate[:, None] * t * 3)[:, None] + 0.1 * torch.randn(16, 2, 64, generator=self.gen)
        return x, rate

    def step(self):
        x, rate = self.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = self.net(x)
        loss = nn.functional.huber_loss(pred.float(), rate)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        adaptive_clip_grad(self.net.parameters())  # CAUSE
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


net = ECGNet()
MODULES = [net]
watch(*MODULES)
trainer = Trainer(net)
history = [trainer.step() for _ in range(80)]
print("first", sum(history[:5]) / 5, "last", sum(history[-5:]) / 5)
