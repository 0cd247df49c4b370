import io
import math
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)


def export_of_logger(days=420):
    """what the data logger of the river gauge writes: day,rain,temp,stage"""
    g = torch.Generator().manual_seed(77)
    rain = torch.rand(days, generator=g).pow(4) * 30
    temp = 8 + 9 * torch.sin(torch.arange(days) / 58.0) + torch.randn(days, generator=g)
    stage, out = 1.0, io.StringIO()
    out.write("day,rain,temp,stage\n")
    for d in range(days):
        stage = 0.9 * stage + 0.02 * rain[d].item() + 0.01
        t = "NAN" if 300 <= d < 302 else f"{temp[d].item():.2f}"   # sensor swapped
        out.write(f"{d},{rain[d].item():.2f},{t},{stage:.3f}\n")
    return out.getvalue()


def read_series(text):
    rows = text.strip().split("\n")[1:]
    table = torch.tensor([[float(c) for c in r.split(",")[1:]] for r in rows])  # CAUSE
    scale = torch.tensor([10.0, 10.0, 1.0])
    return table / scale


class Gauge(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.h = h
        self.inp = nn.Linear(2, h)
        self.rec = nn.Linear(h, h, bias=False)
        self.mix = nn.Linear(h, h)
        self.out = nn.Linear(h, 1)

    def forward(self, forcing):
        s = forcing.new_zeros(forcing.size(0), self.h)
        for t in range(forcing.size(1)):
            z = torch.sigmoid(self.inp(forcing[:, t]) + self.rec(s))
            s = (1 - z) * s + z * torch.tanh(self.mix(s) + self.inp(forcing[:, t]))
        return self.out(s).squeeze(-1)


class Windows(torch.utils.data.Dataset):
    def __init__(self, series, n=12):
        self.series, self.n = series, n

    def __len__(self):
        return len(self.series) - self.n

    def __getitem__(self, i):
        w = self.series[i:i + self.n]  # CAUSE
        return w[:, :2], w[-1, 2]


series = read_series(export_of_logger())
loader = torch.utils.data.DataLoader(Windows(series), batch_size=24, shuffle=False)
model = Gauge()
MODULES = [model]
opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
watch(*MODULES)

for epoch in range(3):
    total = 0.0
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            q = model(x)
        loss = nn.functional.huber_loss(q.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if math.isfinite(loss.item()):
            total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.4f}")
