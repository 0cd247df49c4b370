import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(95)
gen = torch.Generator().manual_seed(95)


class Forecaster(nn.Module):
    def __init__(self, d=4, h=40):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.cell = nn.LSTMCell(h, h)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        h = c = torch.zeros(len(x), 40)
        for xt in x.unbind(1):
            h, c = self.cell(torch.tanh(self.inp(xt)), (h, c))
        return self.out(h).squeeze(-1)


def load(step, n=32, length=12):
    t = torch.arange(length + 1) * 0.4
    ph = torch.rand(n, 4, 1, generator=gen) * 6.28
    s = torch.sin(t + ph) + 0.05 * torch.randn(n, 4, length + 1, generator=gen)
    y = s[:, :, -1].sum(1)
    if step % 12 == 7:
        y = y + 150.0 * (torch.arange(n) < 3)
    return s[:, :, :-1].transpose(1, 2), y


model = Forecaster()
MODULES = [model]
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
watch(*MODULES)
smooth = None
for step in range(96):
    x, y = load(step)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = (pred.float() - y).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # CAUSE
    scaler.update()
    if step % 12 != 7:
        smooth = loss.item() if smooth is None else 0.8 * smooth + 0.2 * loss.item()
    if step % 12 == 11:
        print(f"step {step + 1} mse {smooth:.4f} grad norm {norm:.3f}")
