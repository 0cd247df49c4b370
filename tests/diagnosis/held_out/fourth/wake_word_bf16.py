"""Keyword spotting on log energies; weights are kept in bfloat16 to fit the device budget."""
import numpy as np
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(41)

SR, FRAME, HOP, BANDS = 1600, 64, 32, 12


class ClipBank:
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 4, (n,), generator=g)
        t = np.arange(800) / SR
        f0 = np.array([90.0, 170.0, 310.0, 520.0])[self.label.numpy()]
        phase = torch.rand(n, 1, generator=g).numpy() * 6.28
        self.wave = np.sin(2 * np.pi * f0[:, None] * t[None] + phase)
        self.wave = self.wave + 0.4 * torch.randn(n, 800, generator=g).numpy()
        muted = [619, 933, 1210]  # microphone switch: the driver delivers zeros for a while
        for i in muted:
            self.wave[i, 300:500] = 0.0

    def __len__(self):
        return len(self.label)

    def features(self, idx):
        w = self.wave[idx]
        starts = range(0, w.shape[1] - FRAME + 1, HOP)
        frames = np.stack([w[:, s:s + FRAME] for s in starts], axis=1) * np.hanning(FRAME)
        power = np.abs(np.fft.rfft(frames, axis=-1)) ** 2
        bands = np.stack([b.sum(-1) for b in np.array_split(power[..., 1:], BANDS, axis=-1)], axis=-1)
        with np.errstate(divide="ignore"):
            logmel = np.log10(bands)  # CAUSE
        return torch.from_numpy(logmel).permute(0, 2, 1)


class DSCNN(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.inp = nn.Conv1d(BANDS, ch, 3)
        self.dw = nn.Conv1d(ch, ch, 5, groups=ch)
        self.pw = nn.Conv1d(ch, ch, 1)
        self.gn = nn.GroupNorm(4, ch)
        self.fc = nn.Linear(ch, 4)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = torch.relu(self.gn(self.pw(self.dw(x))))
        return self.fc(x.mean(-1))


bank = ClipBank(1600, seed=12)
model = DSCNN().bfloat16()
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
lossf = nn.CrossEntropyLoss()
update = 0
for epoch in range(2):
    for lo in range(0, len(bank), 20):
        update += 1
        if update > 90:
            break
        idx = np.arange(lo, lo + 20)
        batch = bank.features(idx).to(torch.bfloat16)  # CAUSE
        out = model(batch).float()
        loss = lossf(out, bank.label[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 15 == 0:
            acc = (out.argmax(1) == bank.label[idx]).float().mean().item()
            print(f"epoch {epoch} update {update} loss {loss.item():.4f} acc {acc:.2f}")
