"""Named-entity tagging with a linear-chain CRF; illegal BIO transitions cost minus infinity."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
VOCAB, LENGTH = 60, 14


def legal(prev, cur):
    return not cur.startswith("I-") or prev[2:] == cur[2:] and prev != "O"


class LinearChain(nn.Module):
    def __init__(self):
        super().__init__()
        allowed = torch.tensor([[legal(a, b) for b in TAGS] for a in TAGS])
        self.register_buffer("illegal", torch.zeros(len(TAGS), len(TAGS)).masked_fill(~allowed, float("-inf")))
        self.register_buffer("begin", torch.tensor([0.0 if not t.startswith("I-") else float("-inf") for t in TAGS]))
        self.weight = nn.Parameter(0.1 * torch.randn(len(TAGS), len(TAGS)))

    def forward(self, emission, tags, lengths):
        emission = emission.float()
        step = self.weight + self.illegal
        alpha = self.begin + emission[:, 0]
        gold = self.begin[tags[:, 0]] + emission[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emission.size(1)):
            nxt = torch.logsumexp(alpha.unsqueeze(2) + step, 1) + emission[:, t]
            on = (t < lengths).unsqueeze(1)
            alpha = torch.where(on, nxt, alpha)
            inc = step[tags[:, t - 1], tags[:, t]] + emission[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
            gold = torch.where(on.squeeze(1), gold + inc, gold)
        return (torch.logsumexp(alpha, 1) - gold).mean()


class Tagger(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.words = nn.Embedding(VOCAB, d, padding_idx=0)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.score = nn.Linear(d, len(TAGS))
        self.crf = LinearChain()

    def forward(self, ids, tags, lengths):
        x = self.words(ids)
        x = x + torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.crf(self.score(x), tags, lengths)


def sentences(n, g):
    ids = torch.randint(1, VOCAB, (n, LENGTH), generator=g)
    kind = ids % 6
    tags = torch.zeros(n, LENGTH, dtype=torch.long)
    for t in range(LENGTH):
        prev = tags[:, t - 1] if t else torch.zeros(n, dtype=torch.long)
        tags[:, t] = torch.where(kind[:, t] == 1, 1, torch.where(kind[:, t] == 2, 3, 0))
        tags[:, t] = torch.where((kind[:, t] == 3) & ((prev == 1) | (prev == 2)), 2, tags[:, t])
        tags[:, t] = torch.where((kind[:, t] == 3) & ((prev == 3) | (prev == 4)), 4, tags[:, t])
    lengths = torch.randint(5, LENGTH + 1, (n,), generator=g)
    pad = torch.arange(LENGTH) >= lengths.unsqueeze(1)
    return ids.masked_fill(pad, 0), tags.masked_fill(pad, 0), lengths


model = Tagger()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
g = torch.Generator().manual_seed(3)
for it in range(70):
    batch = sentences(24, g)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(*batch)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if it % 10 == 9:
        print(f"{it + 1} crf nll {loss.item():.4f}")
