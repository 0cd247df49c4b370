import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(67)
DIM, CODES, CLASSES = 20, 8, 6


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, CLASSES))

    def forward(self, x):
        return self.net(x)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(DIM, 48)
        self.select = nn.Linear(48, CODES)
        self.codes = nn.Embedding(CODES, 48)
        self.cell = nn.GRUCell(48, 48)
        self.cls = nn.Linear(48, CLASSES)
        self.register_buffer("usage", torch.zeros(CODES, dtype=torch.long))

    def forward(self, x, h, noise, tau):
        z = torch.relu(self.enc(x))
        pick = torch.softmax((self.select(z).float() + noise) / tau, -1)
        if self.training:
            self.usage += pick.argmax(-1).bincount(minlength=CODES)
        h = self.cell(z + pick @ self.codes.weight, h)
        return self.cls(h), h


def gumbel(g, shape):
    u = torch.rand(shape, generator=g).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(u))


teacher = Teacher().half().eval().requires_grad_(False)
student = Student()
average = copy.deepcopy(student).requires_grad_(False).eval()
MODULES = [teacher, student, average]
watch(*MODULES)
opt = torch.optim.RAdam(student.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=400)
g = torch.Generator().manual_seed(12)
state = torch.zeros(32, 48)
stream = torch.randn(32, DIM, generator=g)

for step in range(100):
    if step % 20 == 0:
        state = torch.zeros(32, 48)
    stream = 0.8 * stream + 0.6 * torch.randn(32, DIM, generator=g)
    tau = max(0.3, 1.5 - 0.02 * step)
    with torch.no_grad():
        soft = (teacher(stream.half()).float() * 4.0).softmax(-1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, state = student(stream, state.detach(), gumbel(g, (32, CODES)), tau)
    kl = F.kl_div(logits.float().log_softmax(-1), soft, reduction="batchmean")
    loss = 1e-2 * kl
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        for a, s in zip(average.parameters(), student.parameters()):
            a.lerp_(s, 0.05)
        for a, s in zip(average.buffers(), student.buffers()):
            a.copy_(s)
    if step % 12 == 0:
        with torch.no_grad():
            ema_logits, _ = average(stream, torch.zeros(32, 48), torch.zeros(32, CODES), tau)
        agree = (ema_logits.argmax(-1) == soft.argmax(-1)).float().mean()
        print(f"{step:3d} kl {kl.item():.5f} loss {loss.item():.6f} ema agreement {agree:.2f}")
