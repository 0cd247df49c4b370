"""Character-level GPT, trained as in a well-known small script: micro steps, scaled loss, clipping, cosine decay."""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1337)
gradient_accumulation_steps, batch_size, block_size = 4, 6, 24
n_layer, n_head, n_embd, bias = 2, 4, 48, False
learning_rate, min_lr, max_iters, warmup_iters, lr_decay_iters = 6e-3, 6e-4, 50, 5, 50
weight_decay, beta1, beta2, grad_clip, log_interval = 1e-1, 0.9, 0.95, 1.0, 5
text = ("the cat sat on the mat and the dog sat on the log. a cat and a dog had a chat. "
        "that cat had a hat, and that dog had a cot. the hat was on the mat. ") * 12


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=bias), nn.Linear(n_embd, n_embd, bias=bias)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, n_head, C // n_head).transpose(1, 2) for z in self.c_attn(x).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), CausalSelfAttention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 2 * n_embd, bias=bias), nn.GELU(), nn.Linear(2 * n_embd, n_embd, bias=bias))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.Sequential(*(Block() for _ in range(n_layer))), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.06)

    def forward(self, idx, targets):
        x = self.ln_f(self.h(self.wte(idx) + self.wpe.weight[:idx.size(1)]))
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}],
                                 lr=learning_rate, betas=(beta1, beta2))


chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
gen = torch.Generator().manual_seed(2)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=gen)
    return torch.stack([data[i:i + block_size] for i in ix]), torch.stack([data[i + 1:i + 1 + block_size] for i in ix])


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(len(chars))
watch(model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, enabled=True)
optimizer = model.configure_optimizers()
ctx = torch.autocast("cpu", dtype=torch.float16)
X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if (iter_num + 1) % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num + 1}: loss {lossf:.4f}, lr {get_lr(iter_num):.2e}, scale {scaler.get_scale():g}")

MODULES = (model,)
