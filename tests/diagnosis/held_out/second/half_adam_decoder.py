import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)


class LowMemAdam(torch.optim.Optimizer):
    """Adam that keeps its state in the dtype of the parameters."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                st["t"] += 1
                st["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)  # CAUSE
                step_size = group["lr"] / (1 - b1 ** st["t"])
                denom = (st["v"].sqrt() / (1 - b2 ** st["t"]) ** 0.5).add_(group["eps"])  # CAUSE
                p.addcdiv_(st["m"], denom, value=-step_size)


class GRUTagger(nn.Module):
    def __init__(self, vocab=40, tags=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.wx = nn.Linear(32, 96)
        self.wh = nn.Linear(32, 96, bias=False)
        self.tag = nn.Linear(32, tags)

    def forward(self, ids):
        h = torch.zeros(ids.shape[0], 32, dtype=self.wx.weight.dtype)
        out = []
        for x in self.emb(ids).unbind(1):
            r1, z1, n1 = self.wx(x).chunk(3, -1)
            r2, z2, n2 = self.wh(h).chunk(3, -1)
            z = torch.sigmoid(z1 + z2)
            h = z * h + (1 - z) * torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2)
            out.append(self.tag(h))
        return torch.stack(out, 1)


gen = torch.Generator().manual_seed(33)
tagger = GRUTagger().half()
MODULES = [tagger]
opt = LowMemAdam(tagger.parameters(), lr=6e-3)
watch(*MODULES)
LOSS_SCALE = 64.0
history = []
for step in range(1, 61):
    hi = 24 if step <= 18 else 40
    ids = torch.randint(0, hi, (24, 10), generator=gen)
    tags = ids % 3 + 3 * (torch.roll(ids, 1, 1) % 2)
    logits = tagger(ids)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
    opt.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in tagger.parameters():
        p.grad.div_(LOSS_SCALE)
    opt.step()
    history.append(loss.item())
    if step % 10 == 0:
        w = max(p.detach().abs().max().item() for p in tagger.parameters())
        print(f"step {step} loss {sum(history[-10:]) / 10:.4f} max |w| {w:.3f}")
