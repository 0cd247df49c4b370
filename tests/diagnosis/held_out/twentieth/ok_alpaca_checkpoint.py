"""Instruction tuning of a small causal language model: a half-precision checkpoint is loaded and trained with bf16."""
import io
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)
IGNORE_INDEX, VOCAB, DIM, SEQ, DIGITS = -100, 24, 48, 12, 10


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class DecoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2, self.qkv = RMSNorm(d), RMSNorm(d), nn.Linear(d, 3 * d, bias=False)
        self.o, self.gate, self.up = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers, self.norm = nn.Sequential(DecoderLayer(DIM), DecoderLayer(DIM)), RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        nn.init.normal_(self.pos.weight, std=0.3)

    def forward(self, ids):
        return self.lm_head(self.norm(self.layers(self.embed(ids) + self.pos.weight[:ids.size(1)])))


def converted_checkpoint():
    """What the conversion script leaves: a state dict whose tensors are all float16."""
    buffer = io.BytesIO()
    torch.save({k: v.half() for k, v in Llama().state_dict().items()}, buffer)
    buffer.seek(0)
    return buffer


def from_pretrained(file):
    model = Llama()
    model.load_state_dict(torch.load(file))
    return model


def preprocess(gen, n=16):
    """Instruction: 'reverse' or 'next' and four digits; only the response is scored."""
    digits = torch.randint(0, DIGITS, (n, 4), generator=gen)
    task = torch.randint(0, 2, (n, 1), generator=gen)
    answer = torch.where(task == 0, digits.flip(1), (digits + 1) % DIGITS)
    sep = torch.full((n, 1), DIGITS + 2)
    ids = torch.cat((DIGITS + task, digits, sep, answer), dim=1)
    labels = ids.clone()
    labels[:, :6] = IGNORE_INDEX
    return ids, labels


def cosine(step, total, warmup=4):
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def train(model, max_steps=100, lr=4e-3, accumulation=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: cosine(s, max_steps))
    gen, running = torch.Generator().manual_seed(1), 0.0
    for step in range(max_steps):
        for _ in range(accumulation):
            ids, labels = preprocess(gen)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(ids)
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
            (loss / accumulation).backward()
            running += loss.item() / accumulation
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print({"loss": round(running / 10, 4), "learning_rate": scheduler.get_last_lr()[0], "step": step + 1})
            running = 0.0


model = from_pretrained(converted_checkpoint())
watch(model)
train(model)

MODULES = (model,)
