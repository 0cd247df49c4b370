"""Keyword spotting on one-second clips with a log-mel front end inside the model."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2)

SR, N_FFT, HOP, N_MELS, CLASSES = 2000, 128, 64, 24, 6


def triangular_bank(n_mels, n_bins):
    centres = torch.linspace(0, n_bins - 1, n_mels + 2)
    bins = torch.arange(n_bins).float()
    left, mid, right = centres[:-2, None], centres[1:-1, None], centres[2:, None]
    up, down = (bins - left) / (mid - left), (right - bins) / (right - mid)
    return torch.minimum(up, down).clamp(min=0)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.register_buffer("bank", triangular_bank(N_MELS, N_FFT // 2 + 1))

    def forward(self, wave):
        spec = torch.stft(wave.float(), N_FFT, HOP, window=self.window, return_complex=True)
        power = spec.real.square() + spec.imag.square()
        mel = torch.matmul(self.bank, power)  # CAUSE
        logmel = torch.log(mel.float() + 1e-3)
        return (logmel - logmel.mean(-1, keepdim=True)) / (logmel.std(-1, keepdim=True) + 1e-2)


class KWSNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.front = LogMel()
        self.net = nn.Sequential(
            nn.Conv1d(N_MELS, width, 5, stride=2, padding=2), nn.GroupNorm(4, width), nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.GELU())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, wave):
        return self.head(self.net(self.front(wave)).mean(-1))


class Clips:
    """Synthetic 'words': two formants with an onset, gain augmentation in dB."""

    def __init__(self, seed=32, batch=12):
        self.g = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.t = torch.arange(SR) / SR

    def __iter__(self):
        while True:
            label = torch.randint(0, CLASSES, (self.batch,), generator=self.g)
            f1 = (150 + 110 * label).float()[:, None]
            f2 = 900 - 60 * label.float()[:, None]
            onset = 0.1 + 0.4 * torch.rand(self.batch, 1, generator=self.g)
            env = torch.exp(-((self.t - onset - 0.2) / 0.12) ** 2)
            wave = env * (0.6 * torch.sin(2 * math.pi * f1 * self.t) + 0.3 * torch.sin(2 * math.pi * f2 * self.t))
            wave = wave + 0.02 * torch.randn(self.batch, SR, generator=self.g)
            gain_db = 7.5 * torch.randn(self.batch, 1, generator=self.g)
            yield wave * 10 ** (gain_db / 20), label


class Trainer:
    def __init__(self):
        self.model = KWSNet()
        watch(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=200)

    def train_step(self, wave, label):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(wave).float(), label, label_smoothing=0.05)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    def fit(self, steps=80):
        for step, batch in zip(range(steps), Clips()):
            loss = self.train_step(*batch)
            if step % 10 == 0 or not math.isfinite(loss):
                print(f"{step:3d} loss {loss:.4f} scale {self.scaler.get_scale():g}")


if __name__ == "__main__":
    Trainer().fit()
