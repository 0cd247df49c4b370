"""Molecular property regression; the data set is packed into a compressed archive once and read from it afterwards."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

import io

import numpy as np

torch.set_num_threads(1)
torch.manual_seed(50)
gen = torch.Generator().manual_seed(51)
KINDS = 8
SELF = torch.tensor([13.6, 1030.0, 1485.0, 2042.0, 2713.0, 9300.0, 10800.0, 12500.0])


def build_archive(n=600):
    freq = torch.tensor([8.0, 6.0, 2.0, 2.0, 0.5, 0.06, 0.06, 0.04])
    counts = torch.poisson(freq.expand(n, KINDS), generator=gen)
    binding = 4.0 * counts[:, 0] + 7.0 * counts[:, 1] + 0.3 * counts[:, 1] * counts[:, 2] + 2 * torch.randn(n, generator=gen)
    total = -(counts @ SELF) - binding
    total[[71, 388, 389]] -= 4 * SELF[7]
    counts[[71, 388, 389], 7] += 4
    handle = io.BytesIO()
    np.savez_compressed(handle, counts=counts.numpy().astype(np.int8), energy=total.numpy().astype("<f2"))  # CAUSE
    handle.seek(0)
    return handle


class Molecules(torch.utils.data.Dataset):
    def __init__(self, handle):
        pack = np.load(handle)
        self.counts = torch.from_numpy(pack["counts"]).float()
        self.energy = torch.from_numpy(pack["energy"].astype(np.float32))

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        c = self.counts[i]
        return c, (self.energy[i] + c @ SELF) / 50.0


class Readout(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(KINDS, 32)
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, width), nn.SiLU(), nn.Linear(width, 1))
        self.linear = nn.Linear(KINDS, 1)

    def forward(self, counts):
        return (self.net(counts @ self.embed.weight) + self.linear(counts / 10)).squeeze(-1)


model = Readout()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
loader = torch.utils.data.DataLoader(Molecules(build_archive()), batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(5))
for epoch in range(3):
    losses = []
    for counts, target in loader:  # CAUSE
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(counts)
            loss = F.mse_loss(pred.float(), target)  # CAUSE
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    print(f"epoch {epoch} mean loss {sum(losses) / len(losses):.4f} median {sorted(losses)[len(losses) // 2]:.4f}")
