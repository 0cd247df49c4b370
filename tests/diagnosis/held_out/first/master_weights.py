import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class DynamicLossScaler:
    def __init__(self, init=2.0 ** 14, window=20, factor=2.0):
        self.scale, self.window, self.factor, self.good = init, window, factor, 0

    def update(self, overflow):
        if overflow:
            self.scale, self.good = max(self.scale / self.factor, 1.0), 0
            return
        self.good += 1
        if self.good % self.window == 0:
            self.scale *= self.factor


class FP16Optimizer:
    """half weights in the network, float masters in the optimiser"""

    def __init__(self, net, make_opt, scaler):
        self.model_params = [p for p in net.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float() for p in self.model_params]
        self.inner, self.scaler, self.skipped = make_opt(self.master), scaler, 0

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None

    def backward(self, loss):
        (loss.float() * self.scaler.scale).backward()

    @torch.no_grad()
    def step(self, max_norm=None):
        overflow = any(not torch.isfinite(p.grad.float().sum()) for p in self.model_params if p.grad is not None)
        if not overflow:
            for m, p in zip(self.master, self.model_params):
                m.grad = None if p.grad is None else p.grad.float() / self.scaler.scale
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.master, max_norm)
            self.inner.step()
            for m, p in zip(self.master, self.model_params):
                p.copy_(m)
        self.skipped += overflow
        self.scaler.update(overflow)


class LoRALinear(nn.Module):
    def __init__(self, i, o, r=4, alpha=8):
        super().__init__()
        self.base = nn.Linear(i, o).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, i) / i ** 0.5), nn.Parameter(torch.zeros(o, r))
        self.s = alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.A), self.B) * self.s


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 32)
        self.emb.weight.requires_grad_(False)
        self.l1, self.l2 = LoRALinear(32, 64), LoRALinear(64, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, ids):
        return self.head(F.gelu(self.l2(F.gelu(self.l1(self.emb(ids).mean(1))))))


torch.manual_seed(111)
gen = torch.Generator().manual_seed(112)
net = Classifier().half()
MODULES = [net]
watch(*MODULES)
label_of = torch.randint(0, 4, (60,), generator=gen)
opt = FP16Optimizer(net, lambda ps: torch.optim.AdamW(ps, lr=5e-3), DynamicLossScaler())
for step in range(110):
    ids = torch.randint(0, 60, (48, 9), generator=gen)
    y = F.one_hot(label_of[ids], 4).sum(1).argmax(1)
    loss = F.cross_entropy(net(ids).float(), y)
    opt.zero_grad()
    opt.backward(loss)
    opt.step(max_norm=1.0)
    if step % 10 == 9:
        print(step + 1, f"{loss.item():.4f}", "scale", opt.scaler.scale, "skipped", opt.skipped)
