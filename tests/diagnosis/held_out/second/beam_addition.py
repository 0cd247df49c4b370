import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(67)
BOS, V = 10, 11


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.enc = nn.Linear(4 * d, d)
        self.cell = nn.GRUCell(d, d)
        self.out = nn.Linear(d, V)
        self.register_buffer("legal", torch.tensor([True] * 10 + [False]))

    def start(self, src):
        return torch.tanh(self.enc(self.emb(src).flatten(1))).float()

    def step(self, tok, h):
        h = self.cell(self.emb(tok), h)
        return self.out(h).float().masked_fill(~self.legal, float("-inf")), h

    def forward(self, src, tgt):
        h, tok, outs = self.start(src), torch.full((len(src),), BOS), []
        for t in range(tgt.shape[1]):
            logits, h = self.step(tok, h)
            outs.append(logits)
            tok = tgt[:, t]
        return torch.stack(outs, 1)


@torch.no_grad()
def beam_search(model, src, width=3, length=3):
    n = len(src)
    h = model.start(src).repeat_interleave(width, 0)
    score = torch.full((n, width), float("-inf"))
    score[:, 0] = 0
    tok = torch.full((n * width,), BOS)
    seqs = torch.zeros(n, width, 0, dtype=torch.long)
    for _ in range(length):
        logits, h = model.step(tok, h)
        total = score[..., None] + F.log_softmax(logits, -1).view(n, width, V)
        score, flat = total.flatten(1).topk(width, 1)
        parent, nxt = flat // V, flat % V
        seqs = torch.cat([seqs.gather(1, parent[..., None].expand(-1, -1, seqs.shape[2])), nxt[..., None]], 2)
        h = h[(parent + torch.arange(n)[:, None] * width).flatten()]
        tok = nxt.flatten()
    return seqs[:, 0], score


def problems(gen, n):
    a, b = torch.randint(0, 100, (2, n), generator=gen)
    s = a + b
    return torch.stack([a // 10, a % 10, b // 10, b % 10], 1), torch.stack([s // 100, s // 10 % 10, s % 10], 1)


gen = torch.Generator().manual_seed(67)
model = Seq2Seq()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=40)
for it in range(1, 121):
    src, tgt = problems(gen, 64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 20 == 0:
        with torch.autocast("cpu", dtype=torch.float16):
            best, score = beam_search(model.eval(), *problems(gen, 100)[:1])
        model.train()
        print(it, f"{loss.item():.4f} beams {score.isinf().sum().item()} scale {scaler.get_scale():g}")
