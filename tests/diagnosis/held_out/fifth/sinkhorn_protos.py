import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


@torch.no_grad()
def sinkhorn(scores, eps=0.05, iters=3):
    Q = torch.exp(scores / eps).t()
    Q /= Q.sum()  # CAUSE
    K, B = Q.shape
    for _ in range(iters):
        Q /= Q.sum(1, keepdim=True) * K
        Q /= Q.sum(0, keepdim=True) * B
    return (Q * B).t()


class SwapModel(nn.Module):
    def __init__(self, n_proto=20, dim=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 7, 4), nn.ReLU(), nn.Conv1d(16, 32, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.proj = nn.Linear(32, dim)
        self.prototypes = nn.Linear(dim, n_proto, bias=False)

    def normalise(self):
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def forward(self, wav):
        z = F.normalize(self.proj(self.conv(wav)), dim=1)
        return self.prototypes(z)


class SwapTrainer:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        self.gen = torch.Generator().manual_seed(555)

    def views(self):
        f = torch.randint(2, 12, (24, 1), generator=self.gen).float()
        t = torch.linspace(0, 6.28, 128)
        return [(torch.sin(f * t + 6.28 * torch.rand(24, 1, generator=self.gen)) + 0.2 * torch.randn(24, 128, generator=self.gen))[:, None] for _ in range(2)]

    def training_step(self):
        self.model.normalise()
        a, b = self.views()
        with torch.autocast("cpu", dtype=torch.float16):
            sa, sb = self.model(a), self.model(b)
            qa, qb = sinkhorn(sa), sinkhorn(sb)
            loss = -0.5 * ((qa * F.log_softmax(sb.float() / 0.1, 1)).sum(1).mean() + (qb * F.log_softmax(sa.float() / 0.1, 1)).sum(1).mean())
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


torch.manual_seed(9)
model = SwapModel()
MODULES = [model]
watch(*MODULES)
t = SwapTrainer(model)
print([round(t.training_step(), 3) for _ in range(50)][::10], t.scaler.get_scale())
