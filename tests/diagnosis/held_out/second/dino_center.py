import copy
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Projector(nn.Module):
    def __init__(self, dim_in=24, out=64):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim_in, 96), nn.GELU(), nn.Linear(96, 64))
        self.last = nn.Linear(64, out, bias=False)

    def forward(self, x):
        return self.last(self.mlp(x))


class DINOLoss(nn.Module):
    def __init__(self, out, student_temp=0.1, teacher_temp=0.07, momentum=0.9):
        super().__init__()
        self.st, self.tt, self.m = student_temp, teacher_temp, momentum
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        target = F.softmax((teacher.float() - self.center) / self.tt, dim=-1)  # CAUSE
        return -(target.detach() * F.log_softmax(student.float() / self.st, dim=-1)).sum(-1).mean()

    @torch.no_grad()
    def update_center(self, teacher):
        self.center.mul_(self.m).add_(teacher.sum(dim=0, keepdim=True) / len(teacher), alpha=1 - self.m)  # CAUSE


class SelfDistill:
    def __init__(self, tau=0.99):
        self.student = Projector()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.criterion = DINOLoss(64)
        self.opt = torch.optim.AdamW(self.student.parameters(), lr=1e-3, weight_decay=0.04)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.tau = tau

    def views(self, gen, gain):
        proto = self.protos[torch.randint(0, 10, (256,), generator=gen)]
        base = proto + 0.3 * torch.randn(256, 24, generator=gen)
        v1 = base + 0.1 * torch.randn(256, 24, generator=gen)
        v2 = base + 0.1 * torch.randn(256, 24, generator=gen)
        return v1 * gain, v2 * gain

    def step(self, v1, v2):
        with torch.autocast("cpu", dtype=torch.float16):
            s = self.student(torch.cat([v1, v2]))
            with torch.no_grad():
                t = self.teacher(torch.cat([v2, v1]))
            loss = self.criterion(s, t)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.criterion.update_center(t)
        with torch.no_grad():
            for pt, ps in zip(self.teacher.parameters(), self.student.parameters()):
                pt.lerp_(ps, 1 - self.tau)
        return loss.item()

    def fit(self, steps):
        gen = torch.Generator().manual_seed(77)
        self.protos = torch.randn(10, 24, generator=gen) + 1.0
        for i in range(1, steps + 1):
            gain = 1.0 if i != 40 else 1200.0
            value = self.step(*self.views(gen, gain))
            if i % 10 == 0:
                print(f"[{i}] loss {value:.4f} center {self.criterion.center.abs().max():.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(77)
    sd = SelfDistill()
    MODULES = [sd.student, sd.teacher, sd.criterion]
    watch(*MODULES)
    sd.fit(70)
