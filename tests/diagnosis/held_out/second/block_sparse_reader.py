import math
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def block_layout(n_blocks, window=1, n_global=1):
    i = torch.arange(n_blocks)
    local = (i[:, None] - i[None, :]).abs() <= window
    local[:, :n_global] = True
    return local


class BlockSparseAttention(nn.Module):
    def __init__(self, dim, heads, block, use_global=True):
        super().__init__()
        self.h, self.block = heads, block
        self.n_global = 1 if use_global else 0
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, valid):
        b, n, d = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        layout = block_layout(n // self.block, n_global=self.n_global)
        allow = layout.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        allow = allow[None, None] & valid[:, None, None, :]
        score = q @ k.transpose(-1, -2) / math.sqrt(d // self.h)
        prob = torch.softmax(score.masked_fill(~allow, float("-inf")), dim=-1)  # CAUSE
        return self.o((prob @ v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self, vocab=60, dim=48, block=8):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(64, dim) * 0.02)
        self.layers = nn.ModuleList([
            BlockSparseAttention(dim, 4, block, use_global=True),
            BlockSparseAttention(dim, 4, block, use_global=False),
        ])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in self.layers])
        self.out = nn.Linear(dim, 3)

    def forward(self, ids):
        valid = ids != 0
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for norm, att in zip(self.norms, self.layers):
            x = x + att(norm(x), valid)
        m = valid.to(x.dtype)[..., None]
        return self.out((x * m).sum(1) / m.sum(1))


def bucket(gen, step):
    longest = [24, 32, 40, 64][(step // 5) % 4]
    shortest = longest - 12 if step < 22 else longest // 3
    lens = torch.randint(shortest, longest + 1, (16,), generator=gen)
    lens[0] = longest
    ids = torch.randint(1, 60, (16, longest), generator=gen)
    ids = ids * (torch.arange(longest)[None] < lens[:, None])
    label = (ids.float().sum(1) / lens / 2).floor().long() % 3
    return ids, label


def train():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    gen = torch.Generator().manual_seed(2)
    net = Reader()
    MODULES.append(net)
    watch(*MODULES)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    ema = None
    for step in range(60):
        ids, label = bucket(gen, step)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(ids), label)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        gnorm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {ema:.4f} grad {gnorm:.3f} len {ids.shape[1]}")


MODULES = []
if __name__ == "__main__":
    train()
