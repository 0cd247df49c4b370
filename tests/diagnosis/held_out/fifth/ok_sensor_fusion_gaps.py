import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(81)
gen = torch.Generator().manual_seed(810)

teacher = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
student = nn.Sequential(nn.Linear(24, 48), nn.Hardswish(), nn.Linear(48, 4))
gate = nn.Sequential(nn.Linear(12, 4), nn.Sigmoid())
MODULES = [teacher, student, gate]
watch(*MODULES)
opt = torch.optim.Adam(student.parameters(), lr=3e-3)
opt_gate = torch.optim.SGD(gate.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
done, empty = 0, 0


def read_sensors(i):
    raw = torch.randn(24, 12, generator=gen)
    clean = raw.clone()
    raw[torch.rand(24, 12, generator=gen) < 0.15] = float("nan")      # packet loss
    raw[0, 0] = float("inf") if i % 5 == 0 else raw[0, 0]
    valid = torch.rand(24, generator=gen) < (0.0 if i % 13 == 6 else 0.7)
    return clean, raw, valid


for i in range(70):
    clean, raw, valid = read_sensors(i)
    present = raw.isfinite()
    filled = torch.nan_to_num(raw, nan=0.0, posinf=4.0, neginf=-4.0)
    x = torch.cat([filled, present.float()], 1)[valid]
    if x.shape[0] == 0:
        empty += 1
        continue
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            goal = teacher(clean[valid]).float()
        pred = student(x).float()
        weight = gate(x[:, 12:]).float()
        err = (pred - goal).square()
        loss = (weight.detach() * err).mean() if i % 4 else (weight * err).mean() - 0.1 * weight.mean()
    opt.zero_grad()
    opt_gate.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    if i % 4 == 0:
        scaler.step(opt_gate)
    scaler.update()
    done += 1
print("steps", done, "empty", empty, "loss", loss.item())
