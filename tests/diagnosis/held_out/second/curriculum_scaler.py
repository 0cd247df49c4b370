import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class DynamicScale:
    def __init__(self, scale=2.0 ** 24, window=15):
        self.scale, self.window, self.clean = scale, window, 0

    def backward(self, loss):
        (loss * self.scale).backward()

    @torch.no_grad()
    def step(self, opt):
        grads = [p.grad for g in opt.param_groups for p in g["params"] if p.grad is not None]
        if all(torch.isfinite(g).all() for g in grads):
            for g in grads:
                g.div_(self.scale)
            opt.step()
            self.clean += 1
            if self.clean % self.window == 0:
                self.scale *= 2
            return True
        self.scale, self.clean = self.scale / 2, 0
        return False


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(20, d)
        self.pos = nn.Parameter(torch.randn(24, d) * 0.1)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)])
        self.head = nn.Linear(d, 20)

    def forward(self, ids):
        h = self.emb(ids) + self.pos[: ids.shape[1]]
        for b in self.blocks:
            h = checkpoint(b, h, use_reentrant=False)
        return self.head(h)


def main():
    gen = torch.Generator().manual_seed(53)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    amp = DynamicScale()
    watch(*MODULES)
    skipped = 0
    for it in range(60):
        length = 6 + 3 * (it // 12)
        ids = torch.randint(0, 20, (32, length), generator=gen)
        target = ids.flip(1)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(ids)
        loss = nn.functional.cross_entropy(out.float().flatten(0, 1), target.flatten())
        opt.zero_grad()
        amp.backward(loss)
        skipped += not amp.step(opt)
        if it % 12 == 11:
            print(f"len {length} loss {loss.item():.4f} scale {amp.scale:g} skipped {skipped}")


torch.set_num_threads(1)
torch.manual_seed(53)
net = Encoder()
MODULES = [net]
main()
