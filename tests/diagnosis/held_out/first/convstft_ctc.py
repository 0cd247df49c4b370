import math

import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

SR, N_FFT, HOP, N_MELS, VOCAB = 4000, 128, 64, 24, 6


class ConvSpectrogram(nn.Module):
    """trainable STFT kernels (nnAudio style) followed by a mel matrix and log compression"""

    def __init__(self):
        super().__init__()
        n = torch.arange(N_FFT)
        k = torch.arange(N_FFT // 2 + 1)[:, None]
        win = torch.hann_window(N_FFT)
        ang = 2 * math.pi * k * n / N_FFT
        self.real = nn.Conv1d(1, len(k), N_FFT, stride=HOP, bias=False)
        self.imag = nn.Conv1d(1, len(k), N_FFT, stride=HOP, bias=False)
        self.real.weight.data.copy_((torch.cos(ang) * win)[:, None])
        self.imag.weight.data.copy_((-torch.sin(ang) * win)[:, None])
        edges = torch.linspace(0, N_FFT // 2, N_MELS + 2)
        f = torch.arange(N_FFT // 2 + 1).float()
        up = (f[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        down = (edges[2:, None] - f[None]) / (edges[2:] - edges[1:-1])[:, None]
        self.register_buffer("mel", torch.minimum(up, down).clamp(min=0))

    def forward(self, wav):
        re, im = self.real(wav), self.imag(wav)
        mag = torch.sqrt(re.pow(2) + im.pow(2) + 1e-6)  # CAUSE
        return torch.log1p(self.mel @ mag)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = ConvSpectrogram()
        self.conv = nn.Conv1d(N_MELS, 48, 3, padding=1)
        self.rnn = nn.GRU(48, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, VOCAB)

    def forward(self, wav):
        h = F.relu(self.conv(self.front(wav)))
        h, _ = self.rnn(h.transpose(1, 2))
        return self.out(h)


def utterances(gen, batch=8, tokens=4):
    """each token is a tone of 480 samples; the recording gain differs from session to session"""
    y = torch.randint(1, VOCAB, (batch, tokens), generator=gen)
    t = torch.arange(480) / SR
    f = 150.0 + 250.0 * y.float()
    wav = torch.sin(2 * math.pi * f[..., None] * t).reshape(batch, 1, -1)
    gain = 10 ** (torch.randn(1, generator=gen) * 0.42)
    return gain * (wav + 0.05 * torch.randn(wav.shape, generator=gen)), y


def train(model, steps=75):
    gen = torch.Generator().manual_seed(31)
    opt = torch.optim.Adam([{"params": model.front.parameters(), "lr": 1e-5},
                            {"params": [p for n, p in model.named_parameters() if not n.startswith("front")], "lr": 3e-3}])
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    watch(*MODULES)
    running = None
    for i in range(steps):
        wav, y = utterances(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(wav)
        logp = logits.float().log_softmax(-1).transpose(0, 1)
        loss = ctc(logp, y, torch.full((8,), logp.size(0)), torch.full((8,), y.size(1)))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        if i % 15 == 14:
            print(i + 1, "ctc (running)", round(running, 4))


torch.set_num_threads(1)
torch.manual_seed(12)
net = Recogniser()
MODULES = [net]
train(net)
