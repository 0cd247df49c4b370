"""Retention time of peptides on a liquid chromatography column, robust log-cosh regression."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(47)
lab = torch.Generator().manual_seed(470)

RESIDUES, MAXLEN, GRADIENT_MIDPOINT = 21, 24, 32.0
LOG2 = math.log(2.0)
HYDRO = torch.cat([torch.zeros(1), torch.randn(RESIDUES - 1, generator=lab)])


def digest(n, column="C18"):
    length = torch.randint(7, MAXLEN + 1, (n,), generator=lab)
    seq = torch.randint(1, RESIDUES, (n, MAXLEN), generator=lab)
    seq = seq * (torch.arange(MAXLEN) < length[:, None])
    minutes = GRADIENT_MIDPOINT + 0.75 * HYDRO[seq].sum(1) + 0.4 * torch.randn(n, generator=lab)
    if column == "wash":  # what sticks to the column comes off in the wash at the end
        late = torch.randperm(n, generator=lab)[:2]
        minutes[late] = GRADIENT_MIDPOINT + 18 + 4 * torch.rand(2, generator=lab)
    return seq, minutes.clamp(min=22.0)


class RTNet(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.residue = nn.Embedding(RESIDUES, dim, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(MAXLEN, dim))
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, seq):
        valid = (seq > 0).unsqueeze(-1)
        h = self.residue(seq) + self.place
        h = h + torch.relu(self.mix((h * valid).transpose(1, 2))).transpose(1, 2)
        return self.out(self.norm((h * valid).sum(1))).squeeze(-1)


class LogCosh(torch.autograd.Function):
    """log(cosh(e)) with a forward pass that is stable for large e and one saved tensor."""

    @staticmethod
    def forward(ctx, error):
        ctx.save_for_backward(error)
        size = error.abs()
        return size + F.softplus(-2 * size) - LOG2

    @staticmethod
    def backward(ctx, upstream):
        (error,) = ctx.saved_tensors
        return upstream * (torch.sinh(error) / torch.cosh(error))  # CAUSE


def criterion(pred, minutes):
    target = (minutes - GRADIENT_MIDPOINT).to(pred)
    return LogCosh.apply(pred - target).float().mean()


def acquisitions(total):
    for run in range(total):
        yield run, digest(24, "wash" if run in (57, 80) else "C18")


net = RTNet()
watch(net)
optimizer = torch.optim.NAdam(net.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11, growth_interval=60)
recent = []

for run, (seq, minutes) in acquisitions(90):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(net(seq), minutes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    recent.append(loss.item())
    if run % 10 == 9:
        print(f"run {run:2d} log-cosh of the last ten {sum(recent[-10:]) / 10:.3f} scale {scaler.get_scale():g}")
