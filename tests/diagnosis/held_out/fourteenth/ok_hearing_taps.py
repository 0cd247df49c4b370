"""Feedback canceller for a hearing aid: sparse filter taps, zero-initialised branches, half of it frozen at first."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)

TAPS, STEPS, OPEN_AT = 33, 80, 40


class SparseTaps(nn.Conv1d):
    """Only every fourth tap is a real delay line on the chip, the others have to stay exactly zero."""

    def __init__(self, cin, cout):
        super().__init__(cin, cout, TAPS, padding=TAPS // 2, bias=False)
        self.register_buffer("wired", (torch.arange(TAPS) % 4 == 0).float())
        with torch.no_grad():
            self.weight.mul_(self.wired)
        self.weight.register_hook(lambda g: g * self.wired)


class Canceller(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.split = nn.Conv1d(1, width, 9, padding=4)
        self.paths = nn.ModuleList([SparseTaps(width, width) for _ in range(3)])
        self.alpha = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])
        self.late = nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.Tanh())
        self.open = 0.0
        self.merge = nn.Conv1d(width, 1, 1)

    def forward(self, mic):
        h = self.split(mic)
        for path, alpha in zip(self.paths, self.alpha):
            h = h + alpha * torch.tanh(path(h))
        h = h + self.open * self.late(h)
        return self.merge(h)


def ear_canal(steps, batch=10, length=72):
    r = torch.Generator().manual_seed(91)
    echo = torch.zeros(1, 1, 25)
    echo[0, 0, [4, 12, 20]] = torch.tensor([0.5, -0.3, 0.2])
    for _ in range(steps):
        voice = torch.randn(batch, 1, length, generator=r)
        voice = F.avg_pool1d(voice, 5, stride=1, padding=2) * 2
        mic = voice + F.conv1d(F.pad(voice, (24, 0)), echo)
        quiet = torch.rand(batch, 1, 1, generator=r) < 0.2  # rows of digital silence
        yield mic * ~quiet, voice * ~quiet


model = Canceller()
watch(model)
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=20)

for step, (mic, voice) in enumerate(ear_canal(STEPS)):
    model.open = 0.0 if step < OPEN_AT else 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        clean = model(mic)
        loss = F.mse_loss(clean.float(), voice)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        dead = sum(int(p.weight[..., p.wired == 0].count_nonzero()) for p in model.paths)
        late = model.late[0].weight.grad.abs().max().item()
        print(f"{step:2d} loss {loss.item():.4f} unwired taps used {dead} late grad {late:.2g} scale {scaler.get_scale():g}")
