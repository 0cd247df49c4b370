"""Port of the original GPT-2 code: next-character prediction under autocast with gradient scaling."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(122)
TEXT = "the model reads a line and then writes the line again so that every reader can read the line "
CHARS = sorted(set(TEXT))
HPARAMS = dict(n_vocab=len(CHARS), n_ctx=24, n_embd=48, n_head=4, n_layer=2)


def split_heads(x, n_head):
    n, t, d = x.shape
    return x.view(n, t, n_head, d // n_head).transpose(1, 2)


def attention_mask(nd, ns, *, dtype):
    """Ones in the lower triangle, counted from the lower right corner."""
    i, j = torch.arange(nd)[:, None], torch.arange(ns)
    return (i >= j - ns + nd).to(dtype)


def mask_attn_weights(w):
    nd, ns = w.shape[-2:]
    b = attention_mask(nd, ns, dtype=w.dtype).view(1, 1, nd, ns)
    w = w * b - torch.tensor(1e10, dtype=w.dtype) * (1 - b)  # CAUSE
    return w


class Attn(nn.Module):
    def __init__(self, n_state):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_state, 3 * n_state), nn.Linear(n_state, n_state)

    def multihead_attn(self, q, k, v):
        w = torch.matmul(q, k.transpose(-1, -2)) * v.size(-1) ** -0.5
        w = mask_attn_weights(w)
        w = torch.softmax(w, dim=-1)
        return torch.matmul(w, v)

    def forward(self, x):
        q, k, v = (split_heads(z, HPARAMS["n_head"]) for z in self.c_attn(x).chunk(3, dim=-1))
        a = self.multihead_attn(q, k, v).transpose(1, 2).flatten(2)
        return self.c_proj(a)


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n), Attn(n), nn.LayerNorm(n)
        self.mlp = nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(approximate="tanh"), nn.Linear(2 * n, n))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_embd, n_head, n_layer):
        super().__init__()
        self.wte, self.wpe = nn.Parameter(0.1 * torch.randn(n_vocab, n_embd)), nn.Parameter(0.02 * torch.randn(n_ctx, n_embd))
        self.blocks, self.ln_f = nn.Sequential(*(Block(n_embd) for _ in range(n_layer))), nn.LayerNorm(n_embd)

    def forward(self, X):
        h = self.ln_f(self.blocks(F.embedding(X, self.wte) + self.wpe[:X.size(1)]))
        return h @ self.wte.t()


class Sampler:
    def __init__(self, seed):
        self.tokens = torch.tensor([CHARS.index(c) for c in TEXT * 6])
        self.gen = torch.Generator().manual_seed(seed)

    def sample(self, batch_size, length):
        start = torch.randint(0, len(self.tokens) - length, (batch_size, 1), generator=self.gen)
        return self.tokens[start + torch.arange(length)]


def main(steps=90, batch_size=8, learning_rate=4e-3):
    model = GPT2(**HPARAMS)
    watch(model)
    opt = torch.optim.Adam(model.parameters(), lr=learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
    data_sampler, losses, avg_loss = Sampler(7), [], (0.0, 0.0)
    for counter in range(1, steps + 1):
        context = data_sampler.sample(batch_size, HPARAMS["n_ctx"] + 1)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(context[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), context[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        avg_loss = (avg_loss[0] * 0.9 + losses[-1], avg_loss[1] * 0.9 + 1.0)
        if counter % 10 == 0:
            print(f"[{counter} | {scaler.get_scale():g}] loss={losses[-1]:2.2f} avg={avg_loss[0] / avg_loss[1]:2.2f}")
    return model, losses


model, losses = main()
MODULES = (model,)
