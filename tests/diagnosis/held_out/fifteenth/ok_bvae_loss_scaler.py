"""Bidirectional-inference VAE for speech features, trained with a loss scaler in the style of apex."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)


class LossScaler:
    def __init__(self, scale=2.0 ** 16, window=25):
        self.loss_scale, self.window, self.unskipped = scale, window, 0

    def unscale(self, params):
        grads = [p.grad for p in params if p.grad is not None]
        overflow = any(not torch.isfinite(g).all() for g in grads)
        if not overflow:
            for g in grads:
                g.div_(self.loss_scale)
        return overflow

    def update(self, overflow):
        if overflow:
            self.loss_scale, self.unskipped = self.loss_scale / 2, 0
            print(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {self.loss_scale}")
        else:
            self.unskipped += 1
            if self.unskipped == self.window:
                self.loss_scale, self.unskipped = self.loss_scale * 2, 0


class ConvStack(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(ch, ch, 5, padding=2), nn.Conv1d(ch, ch, 5, padding=2)
        self.norm = nn.LayerNorm(ch)

    def forward(self, x):
        y = self.norm((x + self.conv2(F.relu(self.conv1(x)))).transpose(1, 2))
        return y.transpose(1, 2)


class BVAE(nn.Module):
    def __init__(self, mels=20, ch=32, latent=8, phones=16):
        super().__init__()
        self.latent = latent
        self.text = nn.Embedding(phones, ch)
        self.mel_in, self.bottom_up = nn.Conv1d(mels, ch, 1), nn.ModuleList([ConvStack(ch), ConvStack(ch)])
        self.post = nn.ModuleList(nn.Conv1d(2 * ch, 2 * latent, 1) for _ in range(2))
        self.prior = nn.ModuleList(nn.Conv1d(ch, 2 * latent, 1) for _ in range(2))
        self.z_in = nn.ModuleList(nn.Conv1d(latent, ch, 1) for _ in range(2))
        self.top_down = nn.ModuleList([ConvStack(ch), ConvStack(ch)])
        self.mel_out = nn.Conv1d(ch, mels, 1)

    def forward(self, mel, phones):
        h, ups = self.mel_in(mel), []
        for layer in self.bottom_up:
            h = layer(h)
            ups.append(h)
        x, kl = self.text(phones).transpose(1, 2), 0.0
        for up, post, prior, z_in, down in zip(reversed(ups), self.post, self.prior, self.z_in, self.top_down):
            mq, lq = post(torch.cat([x, up.to(x.dtype)], 1)).float().chunk(2, 1)
            mp, lp = prior(x).float().chunk(2, 1)
            sq, sp = F.softplus(lq) + 1e-3, F.softplus(lp) + 1e-3
            kl = kl + (torch.log(sp / sq) + (sq ** 2 + (mq - mp) ** 2) / (2 * sp ** 2) - 0.5).mean()
            x = down(x + z_in(mq + sq * torch.randn_like(mq)))
        return self.mel_out(x), kl


def utterances(gen, table, n=8, length=24):
    phones = torch.randint(0, 16, (n, length // 4), generator=gen).repeat_interleave(4, 1)
    mel = table[phones].transpose(1, 2) + 0.3 * torch.randn(n, 20, length, generator=gen)
    return mel, phones


gen = torch.Generator().manual_seed(1)
table = torch.randn(16, 20, generator=gen)
model = BVAE()
watch(model)
params = list(model.parameters())
optimizer = torch.optim.Adamax(params, lr=4e-3)
amp_scaler = LossScaler(scale=2.0 ** 17)

for step in range(80):
    alpha = min(1.0, step / 40)
    mel, phones = utterances(gen, table)
    with torch.autocast("cpu", dtype=torch.float16):
        recon, kl = model(mel, phones)
        rec_loss = F.l1_loss(recon.float(), mel) + F.mse_loss(recon.float(), mel)
        loss = 10 * rec_loss + alpha * kl
    optimizer.zero_grad(set_to_none=True)
    (loss * amp_scaler.loss_scale).backward()
    overflow = amp_scaler.unscale(params)
    if not overflow:
        nn.utils.clip_grad_norm_(params, 5.0)
        optimizer.step()
    amp_scaler.update(overflow)
    if step % 10 == 0:
        print(f"step {step} recon {rec_loss.item():.4f} kl {kl.item():.4f} scale {amp_scaler.loss_scale:g}")
