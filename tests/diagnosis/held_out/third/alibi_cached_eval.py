import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)


class AlibiAttention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.h = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).float())

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        total = k.size(2)
        rel = torch.arange(total)[None] - torch.arange(total - t, total)[:, None]
        bias = self.slopes.view(-1, 1, 1) * rel
        bias = bias.masked_fill(rel > 0, float("-inf"))
        w = (q @ k.transpose(-1, -2)) * k.size(-1) ** -0.5 + bias.to(q.dtype)
        o = (w.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d)
        return self.proj(o), (k.detach(), v.detach())


class TinyLM(nn.Module):
    def __init__(self, vocab=24, d=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.n1, self.n2, self.nf = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = AlibiAttention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 96), nn.GELU(), nn.Linear(96, d))

    def forward(self, ids, cache=None):
        x = self.emb(ids)
        a, cache = self.att(self.n1(x), cache)
        x = x + a
        x = x + self.mlp(self.n2(x))
        return self.nf(x) @ self.emb.weight.t(), cache


def batch(g, n=16, t=20):
    s = torch.randint(0, 24, (n, 1), generator=g)
    return (s + torch.arange(t + 1) * torch.randint(1, 4, (n, 1), generator=g)) % 24


@torch.no_grad()
def generate(model, prompt, steps=8):
    model.eval()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, cache = model(prompt)
        out = [logits[:, -1].argmax(-1)]
        for _ in range(steps - 1):
            logits, cache = model(out[-1][:, None], cache)
            out.append(logits[:, -1].argmax(-1))
    model.train()
    return torch.stack(out, 1)


model = TinyLM()
MODULES = [model]
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=9)
g = torch.Generator().manual_seed(610)
watch(*MODULES)
for step in range(1, 81):
    seq = batch(g)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, _ = model(seq[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    warm.step()
    if step % 20 == 0:
        seq = batch(torch.Generator().manual_seed(step), n=8)
        acc = (generate(model, seq[:, :8]) == seq[:, 8:16]).float().mean()
        print(step, round(loss.item(), 3), "continuation", round(acc.item(), 3), scaler.get_scale())
