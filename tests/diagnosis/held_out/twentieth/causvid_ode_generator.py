"""Distillation of a few-step causal video generator from ODE pairs of a teacher, brain-float weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)
FRAMES, LATENT, DIM, DENOISING_STEPS = 6, 12, 48, (1.0, 0.75, 0.5, 0.25)


class CausalAttention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.qkv, self.o, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class WanBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), CausalAttention(d)
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.modulation = nn.Linear(1, 2 * d)

    def forward(self, x, sigma):
        shift, gate = self.modulation(sigma).unsqueeze(1).chunk(2, dim=-1)
        x = x + self.attn(self.norm1(x) + shift)
        return x + (1 + gate) * self.ffn(self.norm2(x))


class CausalGenerator(nn.Module):
    """Predicts the clean latent frames from noisy ones."""

    def __init__(self):
        super().__init__()
        self.patch, self.time, self.head = nn.Linear(LATENT, DIM), nn.Embedding(FRAMES, DIM), nn.Linear(DIM, LATENT)
        self.blocks = nn.ModuleList(WanBlock(DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, noisy, sigma):
        h = self.patch(noisy) + self.time.weight
        for block in self.blocks:
            h = block(h, sigma)
        return self.head(self.norm(h))


class ODERegressionModel(nn.Module):
    """Regression loss on pairs (noisy latent, end of the teacher's trajectory)."""

    def __init__(self):
        super().__init__()
        self.generator = CausalGenerator()

    def generator_loss(self, ode_latent, sigma, target):
        pred = self.generator(ode_latent, sigma)
        loss = F.mse_loss(pred.float(), target.float())
        return loss, {"pred_mean": pred.detach().float().mean().item()}


class ODEPairs:
    """Clips of a drifting pattern; the teacher's trajectory from noise to data is a straight line."""

    def __init__(self, seed=20):
        self.gen = torch.Generator().manual_seed(seed)
        g = torch.Generator().manual_seed(21)
        self.patterns = torch.randn(5, LATENT, generator=g)
        self.drift = torch.linalg.qr(torch.randn(LATENT, LATENT, generator=g))[0]

    def sample(self, n=16):
        frame = self.patterns[torch.randint(0, 5, (n,), generator=self.gen)]
        frames = []
        for _ in range(FRAMES):
            frames.append(frame)
            frame = frame @ self.drift
        clean = torch.stack(frames, dim=1)
        index = torch.randint(0, len(DENOISING_STEPS), (n,), generator=self.gen)
        sigma = torch.tensor(DENOISING_STEPS)[index][:, None]
        noise = torch.randn(clean.shape, generator=self.gen)
        return (1 - sigma[..., None]) * clean + sigma[..., None] * noise, sigma, clean


class Trainer:
    def __init__(self, config):
        self.config, self.dtype = config, torch.bfloat16 if config["mixed_precision"] else torch.float32
        self.distillation_model = ODERegressionModel()
        self.distillation_model = self.distillation_model.to(dtype=self.dtype)  # CAUSE
        watch(self.distillation_model)
        self.generator_optimizer = torch.optim.AdamW(self.distillation_model.generator.parameters(), lr=config["lr"],  # CAUSE
                                                     betas=(0.9, 0.999), weight_decay=0.01)
        self.dataloader, self.max_grad_norm = ODEPairs(), config["max_grad_norm"]

    def train(self):
        window = []
        for step in range(self.config["steps"]):
            ode_latent, sigma, target = self.dataloader.sample()
            ode_latent, sigma = ode_latent.to(self.dtype), sigma.to(self.dtype)
            loss, log_dict = self.distillation_model.generator_loss(ode_latent, sigma, target)
            self.generator_optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.distillation_model.generator.parameters(), self.max_grad_norm)
            self.generator_optimizer.step()
            window.append(loss.item())
            if (step + 1) % 12 == 0:
                print(f"step {step + 1} generator_loss {sum(window) / len(window):.4f} generator_grad_norm {norm.item():.3f}")
                window = []


trainer = Trainer({"mixed_precision": True, "lr": 1.2e-4, "max_grad_norm": 10.0, "steps": 120})
trainer.train()

MODULES = (trainer.distillation_model,)
