"""data2vec-like regression of teacher features; the conv front end is trained at a reduced rate."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


torch.set_num_threads(1)
torch.manual_seed(8)
g = torch.Generator().manual_seed(2024)


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mult):
        ctx.mult = mult
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mult, None  # CAUSE


class Student(nn.Module):
    def __init__(self, dim=48, feature_grad_mult=0.003):
        super().__init__()
        self.feature_grad_mult = feature_grad_mult
        self.frontend = nn.Sequential(
            nn.Conv1d(1, 24, 8, stride=4, padding=2), nn.GELU(),
            nn.Conv1d(24, dim, 4, stride=2, padding=1), nn.GELU())
        self.mask_emb = nn.Parameter(torch.zeros(dim))
        self.context = nn.GRU(dim, dim, batch_first=True)
        self.regress = nn.Linear(dim, dim)

    def forward(self, wav, mask):
        z = self.frontend(wav.unsqueeze(1))
        z = GradMultiply.apply(z, self.feature_grad_mult).transpose(1, 2)
        z = torch.where(mask.unsqueeze(-1), self.mask_emb.to(z.dtype), z)
        c, _ = self.context(z)
        return self.regress(c)


def speech(n, samples=512):
    t = torch.arange(samples) / samples
    f = torch.rand(n, 1, generator=g) * 30 + 5
    return torch.sin(6.2832 * f * t) * (0.3 + torch.rand(n, 1, generator=g)) + 0.05 * torch.randn(n, samples, generator=g)


student = Student()
teacher = Student()
teacher.requires_grad_(False)
MODULES = [student, teacher]
watch(*MODULES)
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2000)
start = [p.detach().clone() for p in student.frontend.parameters()]
for update in range(40):
    wav = speech(24)
    mask = torch.rand(24, 64, generator=g) < 0.3
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        target = teacher(wav, torch.zeros_like(mask)).float()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = student(wav, mask)
    loss = ((pred.float() - target)[mask] ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gn = torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if (update + 1) % 10 == 0:
        moved = max((a - b).abs().max().item() for a, b in zip(start, student.frontend.parameters()))
        print(f"update {update + 1} loss {loss.item():.5f} grad norm {gn.item():.2e} front end moved {moved:.2e}")
