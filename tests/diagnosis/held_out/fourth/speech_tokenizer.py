import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(29)

class EMAQuantizer(nn.Module):
    def __init__(self, n_codes=24, dim=16, decay=0.95):
        super().__init__()
        self.decay = decay
        codes = torch.randn(n_codes, dim)
        self.register_buffer("codebook", codes)
        self.register_buffer("code_sum", codes.clone())
        self.register_buffer("code_count", torch.ones(n_codes))

    def forward(self, z):  # (B, T, D)
        flat = z.reshape(-1, z.shape[-1]).float()
        d = flat.square().sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.square().sum(1)  # CAUSE
        idx = d.argmin(dim=1)
        q = self.codebook[idx].view_as(z)  # CAUSE
        if self.training:
            self._refresh(flat.detach(), idx)
        commit = F.mse_loss(z.float(), q)
        return z + (q - z).detach(), commit, idx

    @torch.no_grad()
    def _refresh(self, flat, idx):
        one_hot = F.one_hot(idx, len(self.codebook)).float()
        self.code_count.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
        embed_sum = torch.zeros_like(self.code_sum).index_add_(0, idx, flat)
        self.code_sum.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)  # CAUSE
        n = self.code_count.sum()
        count = (self.code_count + 1e-3) / (n + 1e-3 * len(self.code_count)) * n
        self.codebook.copy_(self.code_sum / count.unsqueeze(1))  # CAUSE

class Tokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, 24, 8, stride=4, padding=2), nn.ELU(), nn.Conv1d(24, 48, 3, padding=1), nn.ELU(),
                                 nn.Conv1d(48, 16, 3, padding=1))
        self.vq = EMAQuantizer()
        self.dec = nn.Sequential(nn.Conv1d(16, 48, 3, padding=1), nn.ELU(), nn.ConvTranspose1d(48, 1, 8, stride=4, padding=2))

    def forward(self, wav):
        z = self.enc(wav.unsqueeze(1)).transpose(1, 2)
        q, commit, idx = self.vq(z)
        return self.dec(q.transpose(1, 2)).squeeze(1), commit, idx

gen = torch.Generator().manual_seed(300)

def read_clips(n=12, length=256):
    t = torch.arange(length) / length
    f = 3 + 12 * torch.rand(n, 1, generator=gen)
    wav = torch.sin(6.2832 * f * t) * (0.4 + 0.6 * torch.rand(n, 1, generator=gen))
    return wav + 0.05 * torch.randn(n, length, generator=gen)

def pcm16(clips):
    return (clips * 32767).round()

net = Tokenizer()
MODULES = [net]

def train(net, steps=70):
    watch(*MODULES)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.8, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11)
    for step in range(1, steps + 1):
        clips = read_clips()
        if step == 33:  # one recording of the new vendor is integer PCM
            clips[5] = pcm16(clips[5]) * 4.0
        with torch.autocast("cpu", dtype=torch.float16):
            recon, commit, idx = net(clips)
            recon_loss = F.smooth_l1_loss(recon.float(), clips)
            loss = recon_loss + 0.1 * commit.clamp(max=50.0)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 7 == 0:
            print(f"{step:3d} recon {recon_loss.item():.4f} commit {commit.item():.4f} used {idx.unique().numel()}")

train(net)
