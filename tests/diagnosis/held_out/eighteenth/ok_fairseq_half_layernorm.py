"""Translation of digit strings with the whole forward pass in half, layer norms too; master weights in float32."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(147)
WORDS, LENGTH, BOS = 16, 7, 16


class Attention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads, self.scaling = heads, (d // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, query, key, causal=False):
        b, t, d = query.shape
        q, k, v = (m(z).view(b, -1, self.heads, d // self.heads).transpose(1, 2) for m, z in ((self.q, query), (self.k, key), (self.v, key)))
        scores = (q * self.scaling) @ k.transpose(-2, -1)
        if causal:
            scores = scores + torch.full((t, t), -math.inf, dtype=scores.dtype).triu(1)
        weights = torch.softmax(scores.float(), -1).type_as(scores)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class Transformer(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS + 1, d), nn.Embedding(LENGTH + 1, d)
        self.enc_attn, self.dec_attn, self.cross = Attention(d), Attention(d), Attention(d)
        self.enc_ffn, self.dec_ffn = (nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(5))
        self.project = nn.Linear(d, WORDS)

    def forward(self, source, previous):
        x = self.embed(source) + self.positions.weight[:LENGTH]
        x = self.norms[0](x + self.enc_attn(x, x))
        x = self.norms[1](x + self.enc_ffn(x))
        y = self.embed(previous) + self.positions.weight[:LENGTH]
        y = self.norms[2](y + self.dec_attn(y, y, causal=True))
        y = self.norms[3](y + self.cross(y, x))
        return self.project(self.norms[4](y + self.dec_ffn(y)))


class DynamicLossScaler:
    def __init__(self, init_scale=2.0 ** 11, scale_window=50):
        self.loss_scale, self.scale_window, self.iter, self.last_overflow = init_scale, scale_window, 0, -1

    def update_scale(self, overflow):
        if overflow:
            self.loss_scale, self.last_overflow = self.loss_scale / 2, self.iter
        elif (self.iter - self.last_overflow) % self.scale_window == 0:
            self.loss_scale *= 2
        self.iter += 1


class FP16Trainer:
    def __init__(self, model, lr=3e-3, clip_norm=2.0):
        self.model, self.clip_norm = model.half(), clip_norm
        self.fp16 = list(model.parameters())
        self.fp32 = [p.detach().clone().float() for p in self.fp16]
        self.optimizer, self.scaler = torch.optim.Adam(self.fp32, lr=lr, betas=(0.9, 0.98)), DynamicLossScaler()

    def train_step(self, source, target):
        previous = torch.cat([torch.full((len(target), 1), BOS), target[:, :-1]], 1)
        logits = self.model(source, previous)
        loss = F.nll_loss(F.log_softmax(logits.float(), -1).flatten(0, 1), target.flatten(), reduction="sum")
        self.model.zero_grad()
        (loss * self.scaler.loss_scale / target.numel()).backward()
        for p32, p16 in zip(self.fp32, self.fp16):
            p32.grad = p16.grad.float() / self.scaler.loss_scale
        norm = nn.utils.clip_grad_norm_(self.fp32, self.clip_norm)
        overflow = not torch.isfinite(norm)
        self.scaler.update_scale(overflow)
        if not overflow:
            self.optimizer.step()
            with torch.no_grad():
                for p32, p16 in zip(self.fp32, self.fp16):
                    p16.copy_(p32)
        return loss.item() / target.numel() / math.log(2), float(norm)


model = Transformer()
watch(model)
trainer = FP16Trainer(model)
gen = torch.Generator().manual_seed(148)
table = torch.randperm(WORDS, generator=gen)
for update in range(100):
    source = torch.randint(0, WORDS, (24, LENGTH), generator=gen)
    loss, gnorm = trainer.train_step(source, table[source.flip(1)])
    if update % 20 == 0 or update == 99:
        print(f"| epoch 001: {update} loss={loss:.3f} gnorm={gnorm:.3f} loss_scale={trainer.scaler.loss_scale:g}")
