import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def build():
    return nn.Sequential(
        nn.Conv1d(3, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.SiLU(),
        nn.Conv1d(24, 32, 3, stride=2, padding=1), nn.SiLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4))


class MeanTeacher:
    """student in autocast, inference copy kept in bfloat16 to save memory"""

    def __init__(self, student, decay):
        self.student = student
        self.teacher = build()
        self.teacher.load_state_dict(student.state_dict())
        self.teacher = self.teacher.bfloat16().eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def absorb(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast.to(slow.dtype), 1.0 - self.decay)  # CAUSE

    @torch.no_grad()
    def predict(self, x):
        return self.teacher(x.bfloat16()).float().softmax(-1)


class Waves:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n, noise=0.6):
        y = torch.randint(0, 4, (n,), generator=self.gen)
        t = torch.linspace(0, 6.28, 32)
        ph = torch.rand(n, 3, 1, generator=self.gen) * 6.28
        x = torch.sin((y[:, None, None] + 1) * t + ph)
        return x + noise * torch.randn(x.shape, generator=self.gen), y


def mixup(x, p, gen, alpha=0.3):
    lam = 1 - alpha * torch.rand(len(x), generator=gen)
    perm = torch.randperm(len(x), generator=gen)
    xm = lam[:, None, None] * x + (1 - lam)[:, None, None] * x[perm]
    return xm, lam[:, None] * p + (1 - lam)[:, None] * p[perm]


torch.set_num_threads(1)
torch.manual_seed(61)
student = build()
mt = MeanTeacher(student, decay=0.999)
MODULES = [student, mt.teacher]
watch(*MODULES)
waves = Waves(61)
val_x, val_y = waves.draw(256)
opt = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=1e-4)
for it in range(120):
    x, y = waves.draw(24)
    xu, _ = waves.draw(24)
    xm, pm = mixup(x, F.one_hot(y, 4).float(), waves.gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sup = F.cross_entropy(student(xm), pm)
        cons = F.mse_loss(student(xu).float().softmax(-1), mt.predict(xu))
        loss = sup + min(1.0, it / 60) * cons
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    mt.absorb()
    if it % 20 == 19:
        with torch.no_grad():
            s = (student.eval()(val_x).argmax(1) == val_y).float().mean().item()
        t = (mt.predict(val_x).argmax(1) == val_y).float().mean().item()
        student.train()
        print(f"{it + 1} loss {loss.item():.4f} student {s:.3f} teacher {t:.3f}")
