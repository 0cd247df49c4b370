import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(55)
torch.set_num_threads(1)


class ConvNet(nn.Module):
    def __init__(self, width, classes=7):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.fc = nn.Linear(width * 16, classes)

    def forward(self, x, return_feat=False):
        f = F.relu(self.c2(F.relu(self.c1(x))))
        out = self.fc(f.flatten(1))
        return (out, f) if return_feat else out


class Distiller(nn.Module):
    """logit + feature distillation; the teacher is a frozen half-precision tower with very large logits"""

    def __init__(self, teacher, student, t=3000.0):
        super().__init__()
        self.teacher, self.student, self.t = teacher, student, t
        self.regressor = nn.Conv2d(16, 32, 1)

    def forward(self, x):
        with torch.no_grad():
            t_out, t_feat = self.teacher(x.half(), return_feat=True)
            t_out, t_feat = t_out.float(), t_feat.float()
        with torch.autocast("cpu", dtype=torch.float16):
            s_out, s_feat = self.student(x, return_feat=True)
            mapped = self.regressor(s_feat)
        p = (t_out / self.t).softmax(1)
        kd = F.kl_div(s_out.float().log_softmax(1), p, reduction="batchmean")
        hint = F.mse_loss(F.normalize(mapped.float().flatten(1), dim=1), F.normalize(t_feat.flatten(1), dim=1), reduction="sum") / len(x)
        return kd, hint, t_out.abs().max()


teacher = ConvNet(32)
with torch.no_grad():
    teacher.fc.weight.mul_(40000.0)
teacher.half().requires_grad_(False).eval()
distiller = Distiller(teacher, ConvNet(16))
MODULES = [distiller]
opt = torch.optim.SGD([
    {"params": distiller.student.parameters(), "lr": 0.05},
    {"params": distiller.regressor.parameters(), "lr": 0.1},
], momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
watch(*MODULES)
gen = torch.Generator().manual_seed(1)
peak = 0.0
for step in range(1, 71):
    x = F.interpolate(torch.randn(24, 1, 4, 4, generator=gen), size=(16, 16), mode="bilinear")
    kd, hint, top = distiller(x)
    loss = kd + 0.5 * hint
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 3.0)
    scaler.step(opt)
    scaler.update()
    peak = max(peak, top.item())
    if step % 10 == 0:
        print(f"{step} kd {kd.item():.4f} hint {hint.item():.4f} peak teacher logit {peak:.0f}")
