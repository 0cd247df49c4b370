"""Small mel-to-waveform generator trained on multi-resolution spectral losses."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)
HOP, FRAMES, BANDS = 16, 24, 20


class Generator(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.pre = nn.Conv1d(BANDS, c, 5, padding=2)
        self.up1 = nn.ConvTranspose1d(c, c // 2, 8, stride=4, padding=2)
        self.up2 = nn.ConvTranspose1d(c // 2, c // 4, 8, stride=4, padding=2)
        self.res = nn.Conv1d(c // 4, c // 4, 7, padding=3)
        self.post = nn.Conv1d(c // 4, 1, 7, padding=3)

    def forward(self, mel):
        x = F.leaky_relu(self.up1(F.leaky_relu(self.pre(mel), 0.1)), 0.1)
        x = F.leaky_relu(self.up2(x), 0.1)
        return torch.tanh(self.post(x + F.leaky_relu(self.res(x), 0.1))).squeeze(1)


def spectrum(wave, n_fft):
    window = torch.hann_window(n_fft)
    spec = torch.stft(wave.float(), n_fft, n_fft // 4, window=window, return_complex=True)
    return torch.sqrt(spec.real.square() + spec.imag.square() + 1e-5)


def spectral_loss(fake, real):
    total = 0.0
    for n_fft in (32, 64, 128):
        f, r = spectrum(fake, n_fft), spectrum(real, n_fft)
        total = total + (f - r).norm() / r.norm() + F.l1_loss(f.log(), r.log())
    return total / 3


class Corpus:
    def __init__(self, seed=10):
        self.g = torch.Generator().manual_seed(seed)
        bank = torch.rand(BANDS, 65, generator=self.g)
        self.bank = bank / bank.sum(1, keepdim=True)

    def pair(self, n=6):
        t = torch.arange(HOP * FRAMES) / 200.0
        f = 2 + 20 * torch.rand(n, 3, 1, generator=self.g)
        amp = torch.rand(n, 3, 1, generator=self.g)
        wave = 0.4 * (amp * torch.sin(6.2832 * f * t)).sum(1)
        mag = torch.stft(wave, 128, HOP, window=torch.hann_window(128), return_complex=True).abs()
        return torch.log(self.bank @ mag[..., :FRAMES] + 1e-3), wave


class Trainer:
    def __init__(self):
        self.net = Generator()
        watch(self.net)
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=2e-3, betas=(0.8, 0.99))
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.998)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=5)
        self.corpus = Corpus()

    def training_step(self):
        mel, wave = self.corpus.pair()
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.net(mel)
        loss = spectral_loss(fake, wave)
        self.optim.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optim)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optim.step()  # CAUSE
        self.scaler.update()
        self.sched.step()
        return loss.item(), float(norm)

    def run(self, steps=90):
        for step in range(steps):
            loss, norm = self.training_step()
            if step % 9 == 0:
                print(f"[{step:3d}] loss {loss:.4f} |g| {norm:.3f} scale {self.scaler.get_scale():g}")


trainer = Trainer()
MODULES = [trainer.net]
trainer.run()
