"""Muon with the Gram form of Newton-Schulz, for the matrices of a small GPT; Adam for the rest."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)
VOCAB, CONTEXT = 40, 16


def zeropower_via_gram_newtonschulz(G, steps=5):
    """Iterates on the small matrix R = X X' instead of X, in fp16 for its better precision; restart at 2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(torch.float16)  # CAUSE
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # CAUSE
    R, Q = X @ X.mT, None
    for i in range(steps):
        if i == 2:
            X = Q @ X
            R, Q = X @ X.mT, None
        Z = b * R + c * R @ R
        if Q is None:
            Q = Z.clone()
            Q.diagonal().add_(a)
        else:
            Q = a * Q + Z @ Q
        if i < steps - 1 and i != 1:
            RZ = a * R + Z @ R
            R = a * RZ + Z @ RZ
    return X.mT @ Q.mT if G.size(-2) > G.size(-1) else Q @ X


def muon_update(grad, momentum, beta=0.95):
    momentum.lerp_(grad, 1 - beta)
    update = zeropower_via_gram_newtonschulz(grad.lerp(momentum, beta))
    return update.to(grad.dtype) * max(1, grad.size(-2) / grad.size(-1)) ** 0.5


class MuonEngine:
    """Static loss scale, as in the fp16 section of the configuration. The orthogonalised update does not depend on
    the scale, so the gradients of the matrices are used as they come; Adam's are divided by it."""

    def __init__(self, model, muon_lr=0.02, adam_lr=2e-3, loss_scale=2.0 ** 14):
        named = list(model.named_parameters())
        self.muon = [p for n, p in named if p.ndim == 2 and n.startswith("blocks")]
        self.muon_lr, self.loss_scale = muon_lr, loss_scale
        self.momentum = [torch.zeros_like(p) for p in self.muon]
        ids = {id(p) for p in self.muon}
        self.adam = torch.optim.Adam([p for _, p in named if id(p) not in ids], lr=adam_lr, betas=(0.9, 0.95))

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    @torch.no_grad()
    def step(self):
        for p, buffer in zip(self.muon, self.momentum):
            p.add_(muon_update(p.grad, buffer), alpha=-self.muon_lr)
            p.grad = None
        for group in self.adam.param_groups:
            for p in group["params"]:
                p.grad.div_(self.loss_scale)
        self.adam.step()
        self.adam.zero_grad()


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d // 2, bias=False)
        self.c_up, self.c_fc, self.c_out = nn.Linear(d // 2, d, bias=False), nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.c_up(self.c_proj(y))
        return x + self.c_out(F.relu(self.c_fc(self.ln_2(x))).square())


class GPT(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, d), nn.Embedding(CONTEXT, d)
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, ids):
        return self.lm_head(self.ln_f(self.blocks(self.wte(ids) + self.wpe.weight[: ids.size(1)])))


def texts(gen, n=12):
    """Letters go round the alphabet by 1 to 4 places, the same in all of a text."""
    first, stride = torch.randint(0, VOCAB, (n, 1), generator=gen), torch.randint(1, 5, (n, 1), generator=gen)
    return (first + stride * torch.arange(CONTEXT + 1)) % VOCAB


model = GPT()
watch(model)
engine = MuonEngine(model)
gen = torch.Generator().manual_seed(102)
start = [p.detach().clone() for p in engine.muon]
for step in range(100):
    ids = texts(gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :CONTEXT])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    engine.backward(loss)
    engine.step()
    if step % 10 == 0 or step == 99:
        moved = sum((p - s).norm().item() for p, s in zip(engine.muon, start))
        print(f"step {step} loss {loss.item() / ids[:, 1:].numel():.4f} matrices moved by {moved:.3f}")
