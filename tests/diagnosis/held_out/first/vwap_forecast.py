import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def load_minutes(seed, n=6000):
    """minute bars: turnover and traded volume, thin trading over lunch"""
    g = torch.Generator().manual_seed(seed)
    price = 20 * torch.exp(0.0015 * torch.randn(n, generator=g).cumsum(0))
    volume = torch.poisson(60 * torch.rand(n, generator=g) + 20, generator=g)
    volume[4021] = 0.0                                   # trading halt
    return price * volume, volume


def features(turnover, volume):
    vwap = turnover / volume  # CAUSE
    lv = torch.log1p(volume)
    scale = vwap[:1000].mean()
    return torch.stack([(vwap - scale) / 2.0, (lv - lv[:1000].mean()) / lv[:1000].std()], 1)


class CausalBlock(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c, 2 * c, 3, dilation=dilation)
        self.mix = nn.Conv1d(c, c, 1)

    def forward(self, x):
        a, b = self.conv(nn.functional.pad(x, (self.pad, 0))).chunk(2, 1)
        return x + self.mix(torch.tanh(a) * torch.sigmoid(b))


class TCN(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.inp = nn.Conv1d(2, c, 1)
        self.blocks = nn.Sequential(*[CausalBlock(c, 2 ** i) for i in range(3)])
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x))).squeeze(1)


torch.set_num_threads(1)
torch.manual_seed(33)
series = features(*load_minutes(330))
model = TCN()
MODULES = [model]


def main():
    watch(*MODULES)
    g = torch.Generator().manual_seed(331)
    opt = torch.optim.NAdam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    win, losses = 48, []
    for step in range(1, 101):
        start = torch.randint(0, len(series) - win - 1, (8,), generator=g)
        chunk = torch.stack([series[s:s + win + 1] for s in start.tolist()])  # CAUSE
        x, y = chunk[:, :-1].transpose(1, 2), chunk[:, 1:, 0]
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
            loss = nn.functional.huber_loss(pred.float(), y - x[:, 0])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        if step % 10 == 0:
            print(step, sum(losses[-10:]) / 10, scaler.get_scale())


main()
