"""Concept slider: a low-rank adapter of a denoiser, trained on latents of a frozen half-precision VAE."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(30)
WEIGHT_DTYPE = torch.float16


class ResnetBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.conv1, self.conv2 = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(F.silu(self.norm(x)))))  # CAUSE


class AutoencoderKL(nn.Module):
    scaling_factor = 0.13

    def __init__(self, ch=16, latent=4):
        super().__init__()
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down = nn.ModuleList([ResnetBlock(ch), ResnetBlock(ch), ResnetBlock(ch)])
        self.norm_out, self.conv_out = nn.GroupNorm(4, ch), nn.Conv2d(ch, 2 * latent, 3, padding=1)

    def encode(self, x):
        h = self.conv_in(x)
        for block in self.down:
            h = F.avg_pool2d(block(h), 2)
        mean, logvar = self.conv_out(F.silu(self.norm_out(h))).chunk(2, 1)
        return mean, logvar.clamp(-30, 20)

    @classmethod
    def from_pretrained(cls):
        """Stands for the released weights."""
        vae = cls()
        with torch.no_grad():
            for block in vae.down:
                block.conv2.weight.mul_(9e4)
        return vae


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=1.0):
        super().__init__()
        self.base = base
        self.lora_down = nn.Conv2d(base.in_channels, rank, 1, bias=False)
        self.lora_up = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = alpha

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_up(self.lora_down(x))


class UNet(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, ch, 3, padding=1), nn.Conv2d(ch, 4, 3, padding=1)
        self.time, self.text = nn.Linear(1, ch), nn.Embedding(3, ch)
        self.mid1, self.mid2 = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, latents, t, prompt):
        emb = self.time(t.view(-1, 1)) + self.text(prompt)
        h = self.conv_in(latents) + emb[:, :, None, None]
        h = h + self.mid1(F.silu(h))
        h = h + self.mid2(F.silu(h))
        return self.conv_out(F.silu(h))


vae = AutoencoderKL.from_pretrained().to(WEIGHT_DTYPE).eval().requires_grad_(False)  # CAUSE
unet = UNet().requires_grad_(False)
unet.mid1, unet.mid2 = LoRA(unet.mid1), LoRA(unet.mid2)
network = [p for n, p in unet.named_parameters() if "lora" in n]
for p in network:
    p.requires_grad_(True)
watch(unet)
optimizer = torch.optim.AdamW(network, lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=500)
gen = torch.Generator().manual_seed(11)
betas = torch.linspace(1e-3, 0.1, 50)
alphas = torch.cumprod(1 - betas, 0)
POSITIVE, NEGATIVE, NEUTRAL = 0, 1, 2


def image_pair(n=2):
    base = F.interpolate(torch.rand(n, 3, 4, 4, generator=gen), size=32, mode="bilinear") * 2 - 1
    return base, (base + 0.3).clamp(-1, 1)


for iteration in range(40):
    low, high = image_pair()
    with torch.no_grad():
        mean, logvar = vae.encode(torch.cat([low, high]).to(WEIGHT_DTYPE))
        noise = torch.randn(mean.shape, generator=gen)
        latents = (mean + torch.exp(0.5 * logvar) * noise.to(mean.dtype)).float() * vae.scaling_factor
    t = torch.randint(0, 50, (len(latents),), generator=gen)
    a = alphas[t].view(-1, 1, 1, 1)
    target = torch.randn(latents.shape, generator=gen)
    noisy = a.sqrt() * latents + (1 - a).sqrt() * target
    prompt = torch.tensor([NEGATIVE, NEGATIVE, POSITIVE, POSITIVE])
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = unet(noisy, t / 50, prompt)
        loss = F.mse_loss(pred, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if iteration % 5 == 0:
        print(f"iteration {iteration} loss {loss.item():.4f} scale {scaler.get_scale():g}")
