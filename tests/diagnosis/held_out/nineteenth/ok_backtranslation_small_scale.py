"""Reverse translation model for back-translation: half weights with float32 masters, loss summed over tokens, update frequency."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1895)
VOCAB, DIM, LEN, PAD, BOS = 36, 40, 10, 0, 1
UPDATE_FREQ, SENTENCES, UPDATES = 8, 200, 50


class DynamicLossScaler:
    def __init__(self, init_scale=2.0 ** 7, scale_window=20, tolerance=0.0, min_loss_scale=1e-6):
        self.loss_scale, self.scale_window, self.tolerance, self.threshold = init_scale, scale_window, tolerance, min_loss_scale
        self.iter, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def update(self, overflow):
        if overflow:
            self.overflows, self.last_overflow = self.overflows + 1, self.iter
            if self.overflows / (self.iter - self.last_rescale) >= self.tolerance:
                self.loss_scale, self.last_rescale, self.overflows = self.loss_scale / 2, self.iter, 0
                if self.loss_scale <= self.threshold:
                    raise FloatingPointError("Minimum loss scale reached")
        elif (self.iter - self.last_overflow) % self.scale_window == 0:
            self.loss_scale, self.last_rescale = self.loss_scale * 2, self.iter
        self.iter += 1


class FP16Optimizer:
    def __init__(self, model, lr):
        self.params = list(model.parameters())
        self.fp32 = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = torch.optim.Adam(self.fp32, lr=lr, betas=(0.9, 0.98))
        self.scaler = DynamicLossScaler()

    def backward(self, loss):
        (loss.float() * self.scaler.loss_scale).backward()

    @torch.no_grad()
    def step(self, sample_size, clip_norm=1.0):
        for m, p in zip(self.fp32, self.params):
            m.grad = p.grad.float() / (self.scaler.loss_scale * sample_size)
        norm = torch.nn.utils.clip_grad_norm_(self.fp32, clip_norm).item()
        overflow = not math.isfinite(norm)
        self.scaler.update(overflow)
        if not overflow:
            self.optimizer.step()
            for m, p in zip(self.fp32, self.params):
                p.copy_(m)
        for p in self.params:
            p.grad = None
        return norm, overflow


class Translator(nn.Module):
    """One encoder and one decoder layer; norms and attention weights in float32."""

    def __init__(self):
        super().__init__()
        self.src, self.tgt, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM), nn.Embedding(LEN + 1, DIM)
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.ffn = nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.out = nn.Linear(DIM, VOCAB)
        for e in (self.src, self.tgt, self.pos):
            nn.init.normal_(e.weight, std=DIM ** -0.5)

    def forward(self, source, previous):
        mem = self.src(source) + self.pos.weight[:source.size(1)]
        x = self.tgt(previous) + self.pos.weight[:previous.size(1)]
        k, v = self.kv(mem).chunk(2, -1)
        attn = (self.q(x) @ k.transpose(1, 2)).float() * 3.0
        attn = attn.masked_fill((source == PAD)[:, None], float("-inf")).softmax(-1).to(v.dtype)
        context = self.o(attn @ v)
        return self.out(x + context + self.ffn(torch.cat((x, context), -1)))


def sentences(gen, n=SENTENCES):
    source = torch.full((n, LEN), PAD)
    for i in range(n):
        m = int(torch.randint(5, LEN + 1, (1,), generator=gen))
        source[i, :m] = torch.randint(2, VOCAB, (m,), generator=gen)
    target = torch.where(source == PAD, PAD, 2 + (source * 5 + 3) % (VOCAB - 2))
    previous = torch.cat((torch.full((n, 1), BOS), target[:, :-1]), 1)
    return source, previous, target


def criterion(logits, target, eps=0.1):
    logp = logits.float().log_softmax(-1)
    keep = target != PAD
    nll = -logp.gather(-1, target[..., None]).squeeze(-1)[keep].sum()
    smooth = -logp.mean(-1)[keep].sum()
    return (1 - eps) * nll + eps * smooth, nll.item(), int(keep.sum())


model = Translator().half()
watch(model)
optimizer = FP16Optimizer(model, lr=4e-3)
gen = torch.Generator().manual_seed(1896)
total_nll, total_tokens = 0.0, 0
for num_updates in range(UPDATES):
    sample_size = 0
    for _ in range(UPDATE_FREQ):
        source, previous, target = sentences(gen)
        loss, nll, ntokens = criterion(model(source, previous), target)
        optimizer.backward(loss)
        sample_size, total_nll, total_tokens = sample_size + ntokens, total_nll + nll, total_tokens + ntokens
    gnorm, overflow = optimizer.step(sample_size)
    if overflow:
        print(f"NOTE: overflow detected, setting loss scale to: {optimizer.scaler.loss_scale:g}")
    if (num_updates + 1) % 10 == 0:
        print(f"num_updates {num_updates + 1} nll_loss {total_nll / total_tokens / math.log(2):.4f} gnorm {gnorm:.3f} "
              f"loss_scale {optimizer.scaler.loss_scale:g}")
        total_nll, total_tokens = 0.0, 0
