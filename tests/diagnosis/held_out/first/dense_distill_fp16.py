import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def make_net(width, depth, classes=5):
    layers, c = [], 3
    for _ in range(depth):
        layers += [nn.Conv2d(c, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()]
        c = width
    return nn.Sequential(*layers, nn.Conv2d(c, classes, 1))


class DistillTrainer:
    temperature = 4.0
    kd_weight = 0.004

    def __init__(self, student, teacher, lr):
        self.student, self.teacher = student, teacher.eval().requires_grad_(False)
        self.opt = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        self.log = []

    def kd(self, s, t):
        p = F.softmax(t.float() / self.temperature, 1)
        logq = F.log_softmax(s.float() / self.temperature, 1)  # CAUSE
        return F.kl_div(logq, p, reduction="none").mean()

    def fit(self, batches):
        for n, img in enumerate(batches, 1):
            with torch.autocast("cpu", dtype=torch.float16):
                with torch.no_grad():
                    soft = self.teacher(img)
                out = self.student(img)
                loss = self.kd_weight * self.kd(out, soft)
            self.opt.zero_grad()
            loss.backward()  # CAUSE
            self.opt.step()
            self.log.append(loss.item())
            if n % 10 == 0:
                agree = (out.argmax(1) == soft.argmax(1)).float().mean().item()
                print(f"step {n} kd {loss.item():.3e} agreement {agree:.3f}")


def unlabeled(gen, n, b=8, size=32):
    for _ in range(n):
        coarse = torch.randn(b, 3, 8, 8, generator=gen)
        yield F.interpolate(coarse, size=(size, size), mode="bilinear") + 0.1 * torch.randn(b, 3, size, size, generator=gen)


torch.set_num_threads(1)
torch.manual_seed(2)
teacher = make_net(24, 2)
with torch.no_grad():
    teacher[-1].weight.mul_(20.0)
student = make_net(16, 3)
MODULES = [student, teacher]
trainer = DistillTrainer(student, teacher, lr=3e-3)
watch(*MODULES)
trainer.fit(unlabeled(torch.Generator().manual_seed(10), 60))
