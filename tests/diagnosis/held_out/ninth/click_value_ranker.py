"""Listwise ranking of shop results; one input column is the raw basket value in euro."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)
C0, C1 = 0.7978845608, 0.044715


class MemoryLeanGelu(torch.autograd.Function):
    """tanh-gelu which keeps only its input and rebuilds the slope on the way back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        sq = x * x  # CAUSE
        th = torch.tanh(C0 * x * (1 + C1 * sq))
        inner = C0 * (1 + 3 * C1 * sq)
        return dy * (0.5 * (1 + th) + 0.5 * x * (1 - th.square()) * inner)


class Scorer(nn.Module):
    def __init__(self, n_feat=20, width=64):
        super().__init__()
        self.embed = nn.Linear(n_feat, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, docs):
        h = MemoryLeanGelu.apply(self.embed(docs))
        h = h + MemoryLeanGelu.apply(self.mid(self.norm(h)))
        return self.out(self.norm(h)).squeeze(-1)


g = torch.Generator().manual_seed(5)
n_query, n_doc = 640, 10
docs = torch.randn(n_query, n_doc, 20, generator=g)
docs[..., 7] = torch.exp(1.6 * torch.randn(n_query, n_doc, generator=g) + 1.8)
gain = docs[..., 0] - 0.7 * docs[..., 3] + 0.4 * docs[..., 7].log() + 0.3 * torch.randn(n_query, n_doc, generator=g)
clicked = gain.argmax(1)

scorer = Scorer()
MODULES = [scorer]
opt = torch.optim.AdamW(scorer.parameters(), lr=2e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=500)
watch(*MODULES)

step = 0
for epoch in range(3):
    hits = 0
    for lo in range(0, n_query, 32):
        step += 1
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            scores = scorer(docs[lo:lo + 32])
            loss = F.cross_entropy(scores, clicked[lo:lo + 32])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        hits += (scores.argmax(1) == clicked[lo:lo + 32]).sum().item()
    print(f"epoch {epoch} hit@1 {hits / n_query:.3f} loss {loss.item():.4f} scale {scaler.get_scale():g}")
