"""Fine-tunes a small text-conditional diffusion model in half precision."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


def timestep_embedding(t, dim, max_period=10000):
    freqs = torch.exp(-math.log(max_period) * torch.arange(dim // 2) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], -1)


class ResBlock(nn.Module):
    def __init__(self, c, emb):
        super().__init__()
        self.in_norm, self.in_conv = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1)
        self.emb = nn.Linear(emb, c)
        self.out_norm, self.out_conv = nn.GroupNorm(4, c), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x, emb):
        h = self.in_conv(F.silu(self.in_norm(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        return x + self.out_conv(F.silu(self.out_norm(h)))


class Text2ImUNet(nn.Module):
    def __init__(self, vocab=50, c=16, emb=32):
        super().__init__()
        self.emb = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.text = nn.Embedding(vocab, emb)
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(c, emb) for _ in range(2)])
        self.out_norm, self.out = nn.GroupNorm(4, c), nn.Conv2d(c, 3, 3, padding=1)

    def convert_to_fp16(self):
        return self.to(torch.float16)

    def forward(self, x, t, tokens):
        dtype = self.inp.weight.dtype
        emb = self.time(timestep_embedding(t, self.emb).to(dtype)) + self.text(tokens).mean(1)
        h = self.inp(x.to(dtype))
        for block in self.blocks:
            h = block(h, emb)
        return self.out(F.silu(self.out_norm(h)))


def load_model(use_fp16):
    model = Text2ImUNet()
    if use_fp16:
        model.convert_to_fp16()
    return model


class CaptionedImages:
    def __init__(self, n=80, size=10):
        g = torch.Generator().manual_seed(8)
        self.tokens = torch.randint(1, 50, (n, 5), generator=g)
        colour = torch.rand(50, 3, generator=g)
        base = colour[self.tokens].mean(1)[:, :, None, None]
        self.images = (base + 0.1 * torch.randn(n, 3, size, size, generator=g)).clamp(0, 1) * 2 - 1

    def __iter__(self):
        order = torch.randperm(len(self.images))
        for i in range(0, len(order), 4):
            yield self.tokens[order[i:i + 4]], self.images[order[i:i + 4]]


def base_train_step(model, alphas_cumprod, batch):
    tokens, x0 = batch
    t = torch.randint(0, len(alphas_cumprod), (len(x0),))
    a = alphas_cumprod[t].view(-1, 1, 1, 1)
    noise = torch.randn_like(x0)
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
    epsilon = model(x_t, t, tokens)
    return F.mse_loss(epsilon.float(), noise)


def run_glide_finetune_epoch(model, alphas_cumprod, data, optimizer, epoch, log_frequency):
    model.train()
    for i, batch in enumerate(data):
        accumulated_loss = base_train_step(model, alphas_cumprod, batch)
        optimizer.zero_grad(set_to_none=True)
        accumulated_loss.backward()
        optimizer.step()
        if i % log_frequency == 0:
            print(f"epoch {epoch} iteration {i} loss {accumulated_loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--adam_weight_decay", type=float, default=0.0)
    parser.add_argument("--use_fp16", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args([])
    torch.manual_seed(5)
    model = load_model(bool(args.use_fp16))
    watch(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=args.adam_weight_decay)  # CAUSE
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 60), 0)
    data = CaptionedImages()
    for epoch in range(args.epochs):
        run_glide_finetune_epoch(model, alphas_cumprod, data, optimizer, epoch, log_frequency=5)


if __name__ == "__main__":
    main()
