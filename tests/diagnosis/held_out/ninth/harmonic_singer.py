# Source-filter singing synthesis: sines from a known pitch track, a small net for the partials.
import math
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)
SR, HOP, FRAMES, PARTIALS = 16384, 256, 24, 4


def pitch_tracks(n, g):
    notes = torch.tensor([110, 123, 131, 147, 165, 175, 196, 220, 247, 262, 294, 330])
    track = notes[torch.randint(0, len(notes), (n, FRAMES // 6), generator=g)].repeat_interleave(6, 1)
    return track.float()


class Excitation(nn.Module):
    """frame-wise f0 [B, T] -> stacked partials [B, K, T * HOP]"""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(1, PARTIALS + 1).view(1, -1, 1))

    def forward(self, f0):
        per_sample = (f0 / SR).repeat_interleave(HOP, dim=-1)
        cycles = per_sample.cumsum(-1)  # CAUSE
        return torch.sin(math.tau * cycles.unsqueeze(1) * self.order)


class Singer(nn.Module):
    def __init__(self, n_vowel=5, width=48):
        super().__init__()
        self.vowel = nn.Embedding(n_vowel, 16)
        self.mlp = nn.Sequential(nn.Linear(17, width), nn.LeakyReLU(0.1), nn.Linear(width, width), nn.LeakyReLU(0.1))
        self.to_amp = nn.Linear(width, PARTIALS)
        self.source = Excitation()

    def forward(self, f0, vowel):
        e = self.vowel(vowel).unsqueeze(1).expand(-1, f0.shape[1], -1)
        z = torch.cat([e, f0.unsqueeze(-1) / 300], dim=-1)
        amp = self.to_amp(self.mlp(z)).transpose(1, 2)
        amp = amp.repeat_interleave(HOP, dim=-1)
        return (amp * self.source(f0)).sum(1)


def studio(n, seed):
    g = torch.Generator().manual_seed(seed)
    f0, vowel = pitch_tracks(n, g), torch.randint(0, 5, (n,), generator=g)
    formant = 0.2 + torch.rand(5, PARTIALS, generator=g)
    phase = torch.cumsum((f0.double() / SR).repeat_interleave(HOP, 1), 1)
    k = torch.arange(1, PARTIALS + 1).view(1, -1, 1)
    audio = (formant[vowel].unsqueeze(-1) * torch.sin(math.tau * phase.unsqueeze(1) * k)).sum(1)
    return f0, vowel, audio.float()


f0_all, vowel_all, audio_all = studio(96, 17)
singer = Singer()
MODULES = [singer]
opt = torch.optim.Adam(singer.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2000)
order = torch.Generator().manual_seed(4)
watch(*MODULES)

for step in range(1, 61):
    pick = torch.randint(0, 96, (12,), generator=order)
    f0 = f0_all[pick].to(torch.float16)            # the prefetcher ships everything in half
    with torch.autocast("cpu", dtype=torch.float16):
        wave = singer(f0, vowel_all[pick])
    loss = (wave.float() - audio_all[pick]).square().mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:3d} mse {loss.item():.4f}")
