"""Fine-tunes a small noise predictor on pictures of one subject and keeps an averaged copy for sampling."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(30)


class UNet(nn.Module):
    def __init__(self, c=24, steps=50):
        super().__init__()
        self.time = nn.Embedding(steps, c)
        self.down = nn.Conv2d(4, c, 3, padding=1)
        self.mid1, self.mid2 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, c), nn.GroupNorm(4, c)
        self.up = nn.Conv2d(2 * c, 4, 3, padding=1)

    def forward(self, x, t):
        a = self.down(x)
        a = a + self.time(t)[:, :, None, None].to(a.dtype)
        b = a + self.mid1(F.silu(self.norm1(a)))
        b = b + self.mid2(F.silu(self.norm2(b)))
        return self.up(torch.cat([a, b], 1))


class EMAModel:
    """Exponential moving average of a model's weights."""

    def __init__(self, model, decay=0.9999, weight_dtype=torch.float32):
        self.decay = decay
        self.averaged_model = copy.deepcopy(model).eval().to(dtype=weight_dtype)  # CAUSE
        self.averaged_model.requires_grad_(False)

    @torch.no_grad()
    def step(self, new_model):
        one_minus_decay = 1 - self.decay
        for ema_param, param in zip(self.averaged_model.parameters(), new_model.parameters()):
            ema_param.sub_(one_minus_decay * (ema_param - param.to(ema_param.dtype)))  # CAUSE


class DreamboothConfig:
    mixed_precision = "bf16"
    use_ema = True
    ema_decay = 0.998
    learning_rate = 1e-3
    max_train_steps = 100
    batch_size = 8


def subject_latents(n=40):
    g = torch.Generator().manual_seed(2)
    base = F.interpolate(torch.randn(1, 4, 4, 4, generator=g), size=12, mode="bilinear")
    return base + 0.1 * torch.randn(n, 4, 12, 12, generator=g)


def diffusion_loss(model, latents, alphas, gen):
    t = torch.randint(0, len(alphas), (len(latents),), generator=gen)
    noise = torch.randn(latents.shape, generator=gen)
    a = alphas[t].view(-1, 1, 1, 1)
    noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
    return F.mse_loss(model(noisy, t).float(), noise)


@torch.no_grad()
def validate(model, latents, alphas, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return diffusion_loss(model, latents, alphas, torch.Generator().manual_seed(123)).item()


def main(cfg):
    weight_dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[cfg.mixed_precision]
    unet = UNet()
    watch(unet)
    ema_model = EMAModel(unet, cfg.ema_decay, weight_dtype) if cfg.use_ema else None
    optimizer = torch.optim.AdamW(unet.parameters(), lr=cfg.learning_rate)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 50), 0)
    latents, gen = subject_latents(), torch.Generator().manual_seed(14)
    for step in range(1, cfg.max_train_steps + 1):
        pick = torch.randint(0, len(latents), (cfg.batch_size,), generator=gen)
        with torch.autocast("cpu", dtype=weight_dtype):
            loss = diffusion_loss(unet, latents[pick], alphas, gen)
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema_model is not None:
            ema_model.step(unet)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} valid {validate(unet, latents, alphas, weight_dtype):.4f} "
                  f"ema {validate(ema_model.averaged_model, latents, alphas, weight_dtype):.4f}")


main(DreamboothConfig)
