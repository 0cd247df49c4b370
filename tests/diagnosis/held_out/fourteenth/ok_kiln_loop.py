"""Glaze temperature forecasting for a kiln: the whole run lives in one autocast region."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(66)


def firings(seed, batch=16, length=48):
    r = torch.Generator().manual_seed(seed)
    while True:
        valve = (torch.rand(batch, length, generator=r) < 0.1).float().cumsum(1).remainder(2)
        loss_rate = 0.02 + 0.03 * torch.rand(batch, 1, generator=r)
        temp, rows = torch.zeros(batch, 1), []
        for t in range(length):
            temp = temp + 0.12 * valve[:, t:t + 1] - loss_rate * temp
            rows.append(temp)
        temp = torch.cat(rows, 1) + 0.01 * torch.randn(batch, length, generator=r)
        yield torch.stack([valve, temp], dim=-1)


class Cell(nn.Module):
    """A minimal gated unit, unrolled by hand."""

    def __init__(self, inputs, width):
        super().__init__()
        self.gate = nn.Linear(inputs + width, width)
        self.cand = nn.Linear(inputs + width, width)

    def forward(self, x, h):
        z = torch.sigmoid(self.gate(torch.cat([x, h], -1)))
        return (1 - z) * h + z * torch.tanh(self.cand(torch.cat([x, z * h], -1)))


class Kiln(nn.Module):
    def __init__(self, width=40, bins=24):
        super().__init__()
        self.cell = Cell(2, width)
        self.out = nn.Linear(width, bins)
        self.register_buffer("centres", torch.linspace(-0.2, 3.2, bins))

    def forward(self, seq):
        h = seq.new_zeros(seq.shape[0], self.cell.gate.out_features)
        steps = []
        for t in range(seq.shape[1] - 1):
            h = self.cell(seq[:, t], h)
            steps.append(self.out(h))
        return torch.stack(steps, 1)


def soft_bins(value, centres):
    near = -((value.unsqueeze(-1) - centres) / 0.1).square()
    return torch.softmax(near.float(), dim=-1)


def updates(model, data, optimizer, count):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _, seq in zip(range(count), data):
            logits = model(seq)
            target = soft_bins(seq[:, 1:, 1], model.centres)
            loss = -(target * torch.log_softmax(logits.float(), dim=-1)).sum(-1).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield loss.item()


kiln = Kiln()
watch(kiln)
losses = []
for n, value in enumerate(updates(kiln, firings(seed=6), torch.optim.Adam(kiln.parameters(), lr=4e-3), count=60)):
    losses.append(value)
    if n % 10 == 9:
        print(f"update {n + 1} mean loss {sum(losses[-10:]) / 10:.4f}")
