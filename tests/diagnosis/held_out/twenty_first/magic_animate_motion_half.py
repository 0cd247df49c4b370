"""Motion module of an image animation model (denoising of short latent clips), all weights in half precision."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(618)
CHANNELS, FRAMES, DIM, TIMESTEPS = 4, 8, 48, 200
weight_dtype = torch.float16


def alphas_cumprod(beta_start=0.00085, beta_end=0.012):
    betas = torch.linspace(beta_start ** 0.5, beta_end ** 0.5, TIMESTEPS) ** 2 * 5
    return torch.cumprod(1 - betas, 0)


def timestep_embedding(t, dim=DIM):
    freqs = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    args = t[:, None].float() * freqs
    return torch.cat((args.cos(), args.sin()), dim=-1)


class TemporalTransformerBlock(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, f, d = x.shape
        q, k, v = (z.view(b, f, self.heads, -1).transpose(1, 2) for z in self.to_qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, f, d))
        return x + self.ff(self.norm2(x))


class UNet3DConditionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.pose_guider = nn.Linear(CHANNELS, DIM), nn.Linear(2, DIM)
        self.time_proj = nn.Linear(DIM, DIM)
        self.frame_pos = nn.Parameter(0.02 * torch.randn(FRAMES, DIM))
        self.motion_modules = nn.Sequential(TemporalTransformerBlock(DIM), TemporalTransformerBlock(DIM))
        self.norm_out, self.conv_out = nn.LayerNorm(DIM), nn.Linear(DIM, CHANNELS)

    def forward(self, sample, timesteps, pose):
        temb = self.time_proj(timestep_embedding(timesteps).to(sample.dtype))
        h = self.conv_in(sample) + self.pose_guider(pose) + temb[:, None] + self.frame_pos
        return self.conv_out(self.norm_out(self.motion_modules(h)))


def clips(gen, n=16):
    """Latents of a figure that swings; the pose sequence tells the phase of the swing."""
    phase = torch.rand(n, 1, generator=gen) * 6.28
    speed = 0.3 + 0.5 * torch.rand(n, 1, generator=gen)
    angle = phase + speed * torch.arange(FRAMES)
    pose = torch.stack((angle.cos(), angle.sin()), dim=-1)
    latents = torch.stack((angle.cos(), angle.sin(), (2 * angle).cos(), torch.ones_like(angle)), dim=-1)
    return latents, pose


def main(learning_rate=2e-3, max_train_steps=80, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-08):
    unet = UNet3DConditionModel().to(dtype=weight_dtype)
    watch(unet)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=learning_rate, betas=(adam_beta1, adam_beta2),
                                  weight_decay=1e-2, eps=adam_epsilon)  # CAUSE
    noise_scheduler, gen = alphas_cumprod(), torch.Generator().manual_seed(6)
    losses = []
    for global_step in range(max_train_steps):
        latents, pose = clips(gen)
        noise = torch.randn(latents.shape, generator=gen)
        timesteps = torch.randint(0, TIMESTEPS, (latents.size(0),), generator=gen)
        a = noise_scheduler[timesteps][:, None, None]
        noisy_latents = a.sqrt() * latents + (1 - a).sqrt() * noise
        model_pred = unet(noisy_latents.to(weight_dtype), timesteps, pose.to(weight_dtype))
        loss = F.mse_loss(model_pred.float(), noise, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (global_step + 1) % 10 == 0:
            print(f"step {global_step + 1} train_loss {sum(losses[-10:]) / 10:.4f}")
    return unet, losses


model, losses = main()
MODULES = (model,)
