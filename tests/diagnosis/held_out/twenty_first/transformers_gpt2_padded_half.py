"""GPT-2 style language model on left-padded sentences of different length: half weights, float32 master copy."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(382)
VOCAB, N_CTX, N_EMBD, N_HEAD, PAD = 30, 18, 48, 4, 0


class Attention(nn.Module):
    def __init__(self, nx, n_ctx):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))
        self.c_attn, self.c_proj = nn.Linear(nx, 3 * nx), nn.Linear(nx, nx)

    def _attn(self, q, k, v, mask):
        w = torch.matmul(q, k) * v.size(-1) ** -0.5
        nd, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - nd:ns, :ns] * mask
        w = w * b - 1e10 * (1 - b)  # CAUSE
        w = nn.Softmax(dim=-1)(w)
        return torch.matmul(w, v)

    def forward(self, x, mask):
        n, t, d = x.shape
        q, k, v = (z.view(n, t, N_HEAD, -1).transpose(1, 2) for z in self.c_attn(x).split(d, dim=2))
        a = self._attn(q, k.transpose(-1, -2), v, mask)
        return self.c_proj(a.transpose(1, 2).reshape(n, t, d))


class Block(nn.Module):
    def __init__(self, d, n_ctx):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(d), Attention(d, n_ctx), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, N_EMBD), nn.Embedding(N_CTX, N_EMBD)
        self.h, self.ln_f = nn.ModuleList(Block(N_EMBD, N_CTX) for _ in range(2)), nn.LayerNorm(N_EMBD)
        for m in (self.wte, self.wpe):
            nn.init.normal_(m.weight, std=0.1)

    def forward(self, input_ids):
        mask = (input_ids != PAD)[:, None, None, :].to(self.wte.weight.dtype)
        hidden = self.wte(input_ids) + self.wpe.weight[:input_ids.size(1)]
        for block in self.h:
            hidden = block(hidden, mask)
        return F.linear(self.ln_f(hidden), self.wte.weight)


class FP16_Optimizer:
    """Keeps float32 masters of the half parameters and scales the loss dynamically."""

    def __init__(self, half_params, lr, scale=2.0 ** 12, window=100):
        self.half_params = list(half_params)
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.half_params]
        self.inner, self.scale, self.window, self.good = torch.optim.Adam(self.masters, lr=lr), scale, window, 0

    def backward(self, loss):
        for p in self.half_params:
            p.grad = None
        (loss * self.scale).backward()

    @torch.no_grad()
    def step(self):
        for m, p in zip(self.masters, self.half_params):
            m.grad = p.grad.float() / self.scale
        if not all(m.grad.isfinite().all() for m in self.masters):
            self.scale, self.good = self.scale / 2, 0
            print(f"OVERFLOW! Skipping step, reducing loss scale to {self.scale}")
            return
        self.inner.step()
        for m, p in zip(self.masters, self.half_params):
            p.copy_(m)
        self.good += 1
        if self.good % self.window == 0:
            self.scale *= 2


def sentences(gen, n=12):
    """Words that count on from a random one in steps of one or two, padded on the left."""
    ids = torch.zeros(n, N_CTX, dtype=torch.long)
    for row in ids:
        length, start, stride = (int(torch.randint(lo, hi, (1,), generator=gen)) for lo, hi in ((8, N_CTX + 1), (0, 28), (1, 3)))
        row[N_CTX - length:] = 1 + (start + stride * torch.arange(length)) % (VOCAB - 1)
    return ids


model = GPT2LMHeadModel().half()
watch(model)
optimizer = FP16_Optimizer(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(3)
losses = []
for step in range(80):
    input_ids = sentences(gen)
    lm_logits = model(input_ids)
    loss = F.cross_entropy(lm_logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), ignore_index=PAD)
    optimizer.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % 10 == 0:
        print(f"step {step + 1} loss {losses[-1]:.4f} loss scale {optimizer.scale:g}")
MODULES = (model,)
