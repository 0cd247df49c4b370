import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(1234)
torch.set_num_threads(1)
VOCAB, PAD, DIM, MAX_TOKENS = 96, 0, 32, 120


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    pad_mask = target.eq(ignore_index)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0).sum()
    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0).sum()  # CAUSE
    eps_i = epsilon / (lprobs.size(-1) - 1)
    return (1.0 - epsilon - eps_i) * nll_loss + eps_i * smooth_loss, nll_loss


class DecoderLayer(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        w = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads)
        w = w.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        x = x + self.o((w @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.relu(self.fc1(self.ln2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        nn.init.normal_(self.tok.weight, std=0.3)
        self.pos = nn.Parameter(0.1 * torch.randn(64, DIM))
        self.layers = nn.ModuleList(DecoderLayer(DIM) for _ in range(2))
        self.ln = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.tok(ids) * math.sqrt(DIM) / 4 + self.pos[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.ln(x), self.tok.weight)          # tied


gen = torch.Generator().manual_seed(99)
successor = torch.randint(1, VOCAB, (VOCAB,), generator=gen)


def batches(n):
    """batches of about MAX_TOKENS tokens, sentence length differs per batch"""
    for _ in range(n):
        length = int(torch.randint(8, 20, (1,), generator=gen))
        seq = torch.randint(1, VOCAB, (MAX_TOKENS // length, length + 1), generator=gen)
        for j in range(1, length + 1):
            keep = torch.rand(seq.shape[0], generator=gen) < 0.9
            seq[:, j] = torch.where(keep, successor[seq[:, j - 1]], seq[:, j])
        yield seq[:, :-1], seq[:, 1:]


model = LM()
MODULES = [model]
watch(*MODULES)
optim = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
warmup = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / 20))
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for num_updates, (src, tgt) in enumerate(batches(100), start=1):
    with torch.autocast("cpu", dtype=torch.float16):
        lprobs = F.log_softmax(model(src), dim=-1)
        loss, nll = label_smoothed_nll_loss(lprobs, tgt, 0.1, PAD)
        loss = loss / tgt.numel()
    optim.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optim)
    gnorm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optim)
    scaler.update()
    warmup.step()
    if num_updates % 10 == 0:
        print(f"| {num_updates} | nll {nll.item() / tgt.numel():.3f} | gnorm {gnorm.item():.3f} | scale {scaler.get_scale():g}")
