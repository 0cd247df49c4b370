import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1234)

class Args:
    vocab, dim, ctx = 64, 48, 32
    micro_batch, accum, max_steps = 4, 4, 60
    lr, spike_factor = 2e-3, 1.75

class CausalBlock(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.silu(self.up(self.n2(x))))

class TinyLM(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tok, self.pos = nn.Embedding(a.vocab, a.dim), nn.Embedding(a.ctx, a.dim)
        self.blocks = nn.Sequential(CausalBlock(a.dim), CausalBlock(a.dim))
        self.norm, self.lm_head = nn.LayerNorm(a.dim), nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.size(1)]
        return self.lm_head(self.norm(self.blocks(x)))

class SpikeGuard:
    """Drops an update when its gradient norm is far above the recent average."""
    def __init__(self, factor, beta=0.9):
        self.factor, self.beta, self.avg, self.dropped = factor, beta, None, 0

    def is_spike(self, norm):
        if self.avg is not None and norm > self.factor * self.avg:
            self.dropped += 1
            return True
        self.avg = norm if self.avg is None else self.beta * self.avg + (1 - self.beta) * norm
        return False

args = Args()
model = TinyLM(args)
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=30)
guard = SpikeGuard(args.spike_factor)
data_rng = torch.Generator().manual_seed(99)

def get_micro_batch():
    start = torch.randint(0, args.vocab, (args.micro_batch, 1), generator=data_rng)
    stride = torch.randint(1, 4, (args.micro_batch, 1), generator=data_rng)
    seq = (start + stride * torch.arange(args.ctx + 1)) % args.vocab
    return seq[:, :-1], seq[:, 1:]

for step in range(1, args.max_steps + 1):
    for micro in range(args.accum):
        x, y = get_micro_batch()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()) / args.accum
        scaler.scale(loss).backward()
    grad_norm = math.sqrt(sum(p.grad.float().pow(2).sum().item() for p in model.parameters()))  # CAUSE
    if guard.is_spike(grad_norm):  # CAUSE
        optimizer.zero_grad(set_to_none=True)
        continue
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item() * args.accum:.4f} gnorm {grad_norm:.2f} dropped {guard.dropped}")
