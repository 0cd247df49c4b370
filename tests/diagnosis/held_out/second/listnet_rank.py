import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)


class Scorer(nn.Module):
    def __init__(self, d_query, d_doc, d=64):
        super().__init__()
        self.q = nn.Linear(d_query, d)
        self.d = nn.Linear(d_doc, d)
        self.mix = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, 1)

    def forward(self, query, docs):
        h = torch.relu(self.q(query))[:, None] + self.d(docs)
        return self.head(self.mix(h)).squeeze(-1) 


def min_max(scores, mask, eps=1e-8):
    hi = scores.masked_fill(~mask, float("-inf")).amax(1, keepdim=True)
    lo = scores.masked_fill(~mask, float("inf")).amin(1, keepdim=True)
    return (scores - lo) / (hi - lo + eps)  # CAUSE


def list_net(scores, relevance, mask, temperature=0.2):
    """top-one cross entropy on scores normalised within each list"""
    z = min_max(scores, mask) / temperature
    logp = torch.log_softmax(z.masked_fill(~mask, -1e4).float(), dim=1)
    target = torch.softmax(relevance.masked_fill(~mask, float("-inf")), dim=1)
    return -(target * logp).sum(1).mean()


def ndcg(scores, relevance, mask, k=5):
    top = scores.masked_fill(~mask, -1e9).topk(k, 1).indices
    disc = 1 / torch.log2(torch.arange(k) + 2.0)
    ideal = relevance.masked_fill(~mask, 0).topk(k, 1).values
    got = relevance.gather(1, top) * mask.gather(1, top)
    return ((got * disc).sum(1) / (ideal * disc).sum(1).clamp(min=1e-6)).mean().item()


gen = torch.Generator().manual_seed(5)
W = torch.randn(24, 20, generator=gen) / 4
w_doc = torch.randn(20, generator=gen)


def lists(n, size=12, shortest=6):
    q = torch.randn(n, 24, generator=gen)
    docs = torch.randn(n, size, 20, generator=gen)
    raw = docs @ w_doc + 0.2 * torch.einsum("nq,qd,nld->nl", q, W, docs)
    rel = (raw / 2 + 4).clamp(0, 8)
    length = torch.randint(shortest, size + 1, (n,), generator=gen)
    return q, docs, rel, torch.arange(size)[None] < length[:, None]


model = Scorer(24, 20)
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
val = lists(128)

for epoch in range(4):
    for it in range(25):
        q, docs, rel, mask = lists(48, shortest=6 if epoch < 2 else 1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = list_net(model(q, docs), rel, mask)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch} loss {loss.item():.4f} ndcg@5 {ndcg(model(val[0], val[1]), val[2], val[3]):.4f}")
    model.train()
