"""Quantisation-aware finetuning: dynamic per-token int8 activations, per-channel weights."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def fake_quant(x, bits=8, dim=-1):
    qmax = 2 ** (bits - 1) - 1
    step = (x.detach().abs().amax(dim, keepdim=True) / qmax).clamp(min=1e-8)  # CAUSE
    q = RoundSTE.apply(x / step).clamp(-qmax - 1, qmax)
    return q * step


class QLinear(nn.Linear):
    quant = False

    def forward(self, x):
        if not self.quant:
            return super().forward(x)
        return F.linear(fake_quant(x), fake_quant(self.weight), self.bias)


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.proj = nn.Linear(10, dim)
        self.tok = QLinear(tokens, tokens)
        self.up, self.down = QLinear(dim, 2 * dim), QLinear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, 5)

    def forward(self, x, keep):
        h = self.proj(x)
        keep = keep.to(h.dtype)
        h = h * keep[..., None]
        h = h + self.tok(h.transpose(1, 2)).transpose(1, 2) * keep[..., None]
        h = h + self.down(F.relu(self.up(h)))
        h = self.norm(h) * keep[..., None]
        return self.cls(h.sum(1) / keep.sum(1, keepdim=True))


def loader(gen, proto, n_batches, batch, tokens):
    for i in range(n_batches):
        y = torch.randint(0, 5, (batch,), generator=gen)
        x = proto[y][:, None] + torch.randn(batch, tokens, 10, generator=gen)
        low = tokens if i % 20 < 12 else tokens // 2
        n = torch.randint(low, tokens + 1, (batch,), generator=gen)
        yield x, y, (torch.arange(tokens)[None] < n[:, None]).float()


def main(quant_from=30):
    gen = torch.Generator().manual_seed(8)
    proto = torch.randn(5, 10, generator=gen) * 0.5
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=500)
    watch(*MODULES)
    for it, (x, y, keep) in enumerate(loader(gen, proto, 80, 32, 12)):
        if it == quant_from:
            for m in net.modules():
                if isinstance(m, QLinear):
                    m.quant = True
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x, keep)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 10 == 9:
            acc = (logits.argmax(1) == y).float().mean()
            print(it + 1, f"{loss.item():.4f} acc {acc:.3f} scale {scaler.get_scale():g}")


torch.set_num_threads(1)
torch.manual_seed(8)
net = Mixer(12, 48)
MODULES = [net]
main()
