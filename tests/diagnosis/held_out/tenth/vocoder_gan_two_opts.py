"""Tiny mel -> waveform GAN (RVC-like training function)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)

class Generator(nn.Module):
    def __init__(self, n_mels=20, ch=32):
        super().__init__()
        self.pre = nn.Conv1d(n_mels, ch, 5, padding=2)
        self.up1 = nn.ConvTranspose1d(ch, ch // 2, 8, stride=4, padding=2)
        self.up2 = nn.ConvTranspose1d(ch // 2, ch // 4, 8, stride=4, padding=2)
        self.post = nn.Conv1d(ch // 4, 1, 7, padding=3)

    def forward(self, mel):
        x = F.leaky_relu(self.pre(mel), 0.1)
        x = F.leaky_relu(self.up1(x), 0.1)
        x = F.leaky_relu(self.up2(x), 0.1)
        return torch.tanh(self.post(x))

class Discriminator(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, ch, 15, 2, 7), nn.Conv1d(ch, ch, 11, 4, 5), nn.Conv1d(ch, 1, 3, 1, 1)])

    def forward(self, wav):
        fmap = []
        for conv in self.convs[:-1]:
            wav = F.leaky_relu(conv(wav), 0.1)
            fmap.append(wav)
        return self.convs[-1](wav), fmap

net_g, net_d = Generator(), Discriminator()
MODULES = [net_g, net_d]
optim_g = torch.optim.AdamW(net_g.parameters(), lr=2e-3, betas=(0.8, 0.99))
optim_d = torch.optim.AdamW(net_d.parameters(), lr=5e-4, betas=(0.8, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11, growth_interval=9)
gen = torch.Generator().manual_seed(31)
mel_basis = torch.randn(20, 16, generator=gen) / 4

def batch(n=6, frames=16):
    t = torch.arange(frames * 16) / 256
    f = torch.rand(n, 1, generator=gen) * 18 + 2
    wav = torch.sin(2 * torch.pi * f * t) * 0.6
    mel = (wav.view(n, frames, 16) @ mel_basis.T).transpose(1, 2)
    return mel, wav.unsqueeze(1)

def train_and_evaluate(steps=80):
    watch(*MODULES)
    for global_step in range(steps):
        mel, wav = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            y_hat = net_g(mel)
            d_real, _ = net_d(wav)
            d_fake, _ = net_d(y_hat.detach())
            loss_disc = ((1 - d_real.float()) ** 2).mean() + (d_fake.float() ** 2).mean()
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        nn.utils.clip_grad_norm_(net_d.parameters(), 100.0)
        scaler.step(optim_d)
        optim_d.step()  # CAUSE

        with torch.autocast("cpu", dtype=torch.float16):
            d_fake, fmap_g = net_d(y_hat)
            with torch.no_grad():
                _, fmap_r = net_d(wav)
            loss_fm = sum(F.l1_loss(a, b) for a, b in zip(fmap_g, fmap_r))
            loss_gen = ((1 - d_fake.float()) ** 2).mean() + 2 * loss_fm + 45 * F.l1_loss(y_hat, wav)
        optim_g.zero_grad()
        scaler.scale(loss_gen).backward()
        scaler.unscale_(optim_g)
        nn.utils.clip_grad_norm_(net_g.parameters(), 1000.0)
        scaler.step(optim_g)
        optim_g.step()  # CAUSE
        scaler.update()
        if global_step % 10 == 0:
            print(f"{global_step} d={loss_disc.item():.3f} g={loss_gen.item():.3f} scale={scaler.get_scale():g}")

if __name__ == "__main__":
    train_and_evaluate()
