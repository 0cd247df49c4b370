"""1-D convolutional network on detector pulses; validated after every epoch, best checkpoint kept."""
import copy

import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(474)


def conv_unit(cin, cout, stride=1):
    return nn.Sequential(nn.Conv1d(cin, cout, 3, stride=stride, padding=1), nn.BatchNorm1d(cout), nn.ReLU())


class PulseNet(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.stem = nn.Conv1d(3, width, 3, padding=1)
        self.relu = nn.ReLU()
        self.bn = nn.BatchNorm1d(width)
        self.body = nn.Sequential(conv_unit(width, 2 * width, 2), conv_unit(2 * width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.bn(self.relu(self.stem(x)))  # CAUSE
        return self.fc(self.body(x).mean(-1))


class Pulses(torch.utils.data.Dataset):
    """Digitised traces in ADC counts. Saturated preamplifier events reach the full range of the card."""

    def __init__(self, n, seed, saturated=()):
        gen = torch.Generator().manual_seed(seed)
        t = torch.arange(32).float()
        self.y = torch.randint(0, 4, (n,), generator=gen)
        tau = torch.tensor([3.0, 5.0, 8.0, 12.0])[self.y].view(n, 1, 1)
        onset = 4 + 4 * torch.rand(n, 1, 1, generator=gen)
        height = 3000 + 5000 * torch.rand(n, 3, 1, generator=gen)
        self.x = height * torch.exp(-(t - onset).clamp(min=0) / tau) * (t >= onset)
        self.x += 200 * torch.randn(n, 3, 32, generator=gen)
        for i in saturated:
            self.x[i] = self.x[i] * 20

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


train_set = Pulses(20 * 16, 0, saturated=(120,))
valid_set = Pulses(64, 1)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=16, shuffle=False)
valid_loader = torch.utils.data.DataLoader(valid_set, batch_size=32)

network = PulseNet()
watch(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
best = (float("inf"), None)

for epoch in range(4):
    network.train()
    running = []
    for data, target in train_loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(network(data), target)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if torch.isfinite(loss):
            running.append(loss.item())

    network.eval()
    total, hits = 0.0, 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for data, target in valid_loader:
            output = network(data)
            total += F.cross_entropy(output, target, reduction="sum").item()
            hits += (output.argmax(-1) == target).sum().item()
    valid_loss = total / len(valid_set)
    if valid_loss < best[0]:
        best = (valid_loss, copy.deepcopy(network.state_dict()))
    print(f"epoch {epoch} train {sum(running) / len(running):.3f} valid {valid_loss:.3f} "
          f"acc {hits / len(valid_set):.2f} scale {grad_scaler.get_scale():.0f}")
