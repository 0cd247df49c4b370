"""Source-filter vocoder: predict log-F0 and an excitation gain from mel frames, then resynthesise."""
import math
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Utterances(Dataset):
    def __init__(self, n, frames, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for i in range(n):
            f0 = 110 + 60 * torch.rand(1, generator=g) + 25 * torch.sin(torch.linspace(0, 6, frames) + i)
            if i in (77, 90):
                f0[frames - 5:] = 0.0
            mel = torch.randn(16, frames, generator=g) * 0.3
            mel[:4] += ((f0.clamp(min=60) - 140) / 40)
            self.items.append((mel, [math.log(v) if v > 0 else float("-inf") for v in f0.tolist()]))  # CAUSE

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        mel, lf0 = self.items[i]
        return mel, torch.tensor(lf0)


class F0Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(16, 48, 5, padding=2), nn.LeakyReLU(0.1),
            nn.Conv1d(48, 48, 3, padding=2, dilation=2), nn.LeakyReLU(0.1))
        self.lf0 = nn.Conv1d(48, 1, 1)
        self.gain = nn.Conv1d(48, 1, 1)

    def forward(self, mel):
        h = self.conv(mel)
        return self.lf0(h).squeeze(1) + 4.9, torch.sigmoid(self.gain(h)).squeeze(1)


def excitation(lf0, gain, hop=8, sr=1600.0):
    f = torch.exp(lf0.float()).repeat_interleave(hop, 1)
    phase = torch.cumsum(f / sr, 1)
    return torch.sin(2 * math.pi * phase) * gain.float().repeat_interleave(hop, 1)


class VocoderTrainer:
    def __init__(self, net, lr):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
        self.n = 0

    def fit_epoch(self, loader):
        for mel, target in loader:  # CAUSE
            with torch.autocast("cpu", dtype=torch.float16):
                lf0, gain = self.net(mel)
                wav = excitation(lf0, gain)
                power = wav.pow(2).mean(1)
                loss = nn.functional.smooth_l1_loss(lf0.float(), target, beta=0.1) + 0.1 * (power - 0.3).abs().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.n += 1
            if self.n % 10 == 0:
                print(self.n, f"{loss.item():.5f}")


torch.set_num_threads(1)
torch.manual_seed(40)
net = F0Net()
MODULES = [net]
watch(*MODULES)
data = DataLoader(Utterances(96, 40, 40), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1))
trainer = VocoderTrainer(net, 2e-3)
for epoch in range(4):
    trainer.fit_epoch(data)
