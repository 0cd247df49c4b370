"""Voice conversion: a waveform generator and a period discriminator, both with their own optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(12)

SEGMENT, HOP, DIM = 256, 16, 24


class GeneratorNSF(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.pre = nn.Conv1d(DIM + 1, c, 3, padding=1)
        self.up1, self.up2 = nn.ConvTranspose1d(c, c, 8, 4, 2), nn.ConvTranspose1d(c, c // 2, 8, 4, 2)
        self.post = nn.Conv1d(c // 2, 1, 7, padding=3)

    def forward(self, phone, pitch):
        x = self.pre(torch.cat([phone, pitch], 1))
        x = self.up1(F.leaky_relu(x, 0.1))
        x = self.up2(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x, 0.1)))


class DiscriminatorP(nn.Module):
    def __init__(self, period=4, c=16):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList([nn.Conv2d(1, c, (5, 1), (2, 1), (2, 0)), nn.Conv2d(c, 2 * c, (5, 1), (2, 1), (2, 0))])
        self.post = nn.Conv2d(2 * c, 1, (3, 1), 1, (1, 0))

    def forward(self, wave):
        b, _, t = wave.shape
        x, fmap = wave.view(b, 1, t // self.period, self.period), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            fmap.append(x)
        return self.post(x).flatten(1), fmap


def mel_like(wave):
    frames = wave.squeeze(1).unfold(-1, 64, HOP)
    return torch.log(torch.fft.rfft(frames * torch.hann_window(64)).abs().clamp(min=1e-5))


def clip_grad_value_(parameters, clip_value):
    total = sum(p.grad.norm(2).item() ** 2 for p in parameters if p.grad is not None) ** 0.5
    if clip_value is not None:
        for p in parameters:
            p.grad.clamp_(-clip_value, clip_value)
    return total


class VoiceData:
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(99)
        frames = SEGMENT // HOP
        self.pitch = 0.02 + 0.06 * torch.rand(n, 1, 1, generator=g).expand(-1, 1, frames)
        phase = 2 * torch.pi * torch.cumsum(self.pitch.repeat_interleave(HOP, -1), -1)
        self.wave = 0.6 * torch.sin(phase) + 0.2 * torch.sin(2 * phase)
        self.phone = torch.randn(n, DIM, frames, generator=g)
        self.phone[:, :2] = torch.stack([phase[:, 0, ::HOP].sin(), phase[:, 0, ::HOP].cos()], 1)

    def batch(self, step, size=8):
        i = torch.arange(size * step, size * step + size) % len(self.wave)
        return self.phone[i], self.pitch[i] * 10, self.wave[i]


def train_and_evaluate(epoch, nets, optims, scaler, data, steps_per_epoch):
    net_g, net_d = nets
    optim_g, optim_d = optims
    for step in range(steps_per_epoch):
        phone, pitch, wave = data.batch(epoch * steps_per_epoch + step)
        with torch.autocast("cpu", dtype=torch.float16):
            y_hat = net_g(phone, pitch)
            y_d_r, _ = net_d(wave)
            y_d_g, _ = net_d(y_hat.detach())
            with torch.autocast("cpu", enabled=False):
                loss_disc = ((1 - y_d_r.float()) ** 2).mean() + (y_d_g.float() ** 2).mean()
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        clip_grad_value_(list(net_d.parameters()), None)
        scaler.step(optim_d)

        with torch.autocast("cpu", dtype=torch.float16):
            y_d_r, fmap_r = net_d(wave)
            y_d_g, fmap_g = net_d(y_hat)
            with torch.autocast("cpu", enabled=False):
                loss_mel = F.l1_loss(mel_like(y_hat.float()), mel_like(wave)) * 45
                loss_fm = 2 * sum((r.float().detach() - g.float()).abs().mean() for r, g in zip(fmap_r, fmap_g))
                loss_gen = ((1 - y_d_g.float()) ** 2).mean()
                loss_gen_all = loss_gen + loss_fm + loss_mel
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = clip_grad_value_(list(net_g.parameters()), None)
        scaler.step(optim_g)
        scaler.update()
        optim_g.step()  # CAUSE
        optim_d.step()  # CAUSE
        if step % 10 == 0:
            print(f"epoch {epoch} step {step} disc {loss_disc.item():.3f} gen {loss_gen_all.item():.3f} "
                  f"mel {loss_mel.item():.3f} grad {grad_norm_g:.2f} scale {scaler.get_scale():g}")


net_g, net_d = GeneratorNSF(), DiscriminatorP()
watch(net_g, net_d)
optim_g = torch.optim.AdamW(net_g.parameters(), 1e-3, betas=(0.8, 0.99), eps=1e-9)
optim_d = torch.optim.AdamW(net_d.parameters(), 1e-3, betas=(0.8, 0.99), eps=1e-9)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(3):
    train_and_evaluate(epoch, (net_g, net_d), (optim_g, optim_d), scaler, VoiceData(), 20)
