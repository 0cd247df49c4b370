"""Class-conditional diffusion transformer for tiny video clips with an averaged copy for sampling (VideoSys / OpenDiT style), bf16."""
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)
FRAMES, SIDE, PATCH, HIDDEN, CLASSES, T = 4, 8, 4, 48, 4, 100
STEPS, BATCH, WARMUP, DECAY = 110, 16, 10, 0.99


class DiTBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d, elementwise_affine=False), nn.LayerNorm(d, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(approximate="tanh"), nn.Linear(2 * d, d))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(d, 4 * d))

    def forward(self, x, c):
        shift1, scale1, shift2, scale2 = self.adaLN_modulation(c)[:, None].chunk(4, -1)
        b, n, d = x.shape
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (z.view(b, n, 4, -1).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, d=HIDDEN):
        super().__init__()
        tokens = FRAMES * (SIDE // PATCH) ** 2
        self.x_embedder, self.pos_embed = nn.Linear(PATCH * PATCH, d), nn.Parameter(0.02 * torch.randn(1, tokens, d))
        self.t_embedder, self.y_embedder = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d)), nn.Embedding(CLASSES, d)
        self.blocks = nn.ModuleList([DiTBlock(d), DiTBlock(d)])
        self.final_norm, self.final_layer = nn.LayerNorm(d), nn.Linear(d, PATCH * PATCH)

    def forward(self, x, t, y):
        dtype = self.pos_embed.dtype
        freqs = torch.exp(-torch.arange(8) / 2)
        angles = t[:, None].float() * freqs
        c = self.t_embedder(torch.cat((angles.cos(), angles.sin()), -1).to(dtype)) + self.y_embedder(y)
        h = self.x_embedder(patchify(x).to(dtype)) + self.pos_embed
        for block in self.blocks:
            h = block(h, c)
        return unpatchify(self.final_layer(self.final_norm(h)))


def patchify(x):
    b, s = len(x), SIDE // PATCH
    return x.view(b, FRAMES, s, PATCH, s, PATCH).permute(0, 1, 2, 4, 3, 5).reshape(b, FRAMES * s * s, PATCH * PATCH)


def unpatchify(x):
    b, s = len(x), SIDE // PATCH
    return x.view(b, FRAMES, s, s, PATCH, PATCH).permute(0, 1, 2, 4, 3, 5).reshape(b, FRAMES, SIDE, SIDE)


@torch.no_grad()
def update_ema(ema_model, model, decay=DECAY):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in model.named_parameters():
        ema_params[name].mul_(decay).add_(param.data.to(ema_params[name].dtype), alpha=1 - decay)  # CAUSE


def clips(gen, n=BATCH):
    """A bright bar that moves in one of four directions."""
    y = torch.randint(0, CLASSES, (n,), generator=gen)
    start = torch.randint(0, SIDE, (n,), generator=gen)
    x = torch.full((n, FRAMES, SIDE, SIDE), -0.5)
    for i in range(n):
        for f in range(FRAMES):
            place = (int(start[i]) + (1 if y[i] % 2 else -1) * f) % SIDE
            if y[i] < 2:
                x[i, f, place] = 1.5
            else:
                x[i, f, :, place] = 1.5
    return x, y


def training_losses(model, x, y, gen):
    t = torch.randint(0, T, (len(x),), generator=gen)
    a = torch.cos(t / T * torch.pi / 2)[:, None, None, None]
    noise = torch.randn(x.shape, generator=gen)
    return F.mse_loss(model(a * x + (1 - a ** 2).sqrt() * noise, t, y).float(), noise)


@torch.no_grad()
def evaluate(model):
    gen = torch.Generator().manual_seed(77)
    return sum(training_losses(model, *clips(gen, 32), gen).item() for _ in range(4)) / 4


dtype = torch.bfloat16
model = DiT()
ema = deepcopy(model).to(dtype).requires_grad_(False)
watch(model)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
gen = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    x, y = clips(gen)
    with torch.autocast("cpu", dtype=dtype):
        loss = training_losses(model, x, y, gen)
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model, 0.0 if step <= WARMUP else DECAY)
    if step % 10 == 0:
        print(f"Step {step:04d} loss {loss.item():.4f} evaluation {evaluate(model):.4f} ema {evaluate(ema):.4f}")
MODULES = (model, ema)
