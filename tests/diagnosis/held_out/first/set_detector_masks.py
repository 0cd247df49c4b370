"""Set prediction with a padded key mask; some classes cannot occur at some sensors and get -inf logits."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

NQ, NCLS, NO_OBJ = 5, 4, 4


class Decoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.queries = nn.Parameter(torch.randn(NQ, d))
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, d))
        self.cls, self.box = nn.Linear(d, NCLS + 1), nn.Linear(d, 2)

    def forward(self, pts, pad):
        m = self.inp(pts)
        att = self.q(self.queries) @ self.k(m).transpose(1, 2) / m.size(-1) ** 0.5
        att = att.masked_fill(pad[:, None], float("-inf")).softmax(-1)
        h = self.norm(self.queries + att @ self.v(m))
        h = h + self.ffn(h)
        return self.cls(h), self.box(h)


def greedy_match(cost):
    cost, pairs = cost.clone(), []
    for _ in range(cost.size(1)):
        k = int(cost.argmin())
        i, j = divmod(k, cost.size(1))
        pairs.append((i, j))
        cost[i], cost[:, j] = float("inf"), float("inf")
    return pairs


def set_loss(logits, boxes, targets, forbidden):
    logits = logits.float().masked_fill(forbidden[:, None], float("-inf"))
    logp = logits.log_softmax(-1)
    cls_t = torch.full(logits.shape[:2], NO_OBJ)
    reg, n = 0.0, 0
    for b, (lab, ctr) in enumerate(targets):
        with torch.no_grad():
            cost = torch.cdist(boxes[b].float(), ctr) - logp[b][:, lab].exp()
        for i, j in greedy_match(cost):
            cls_t[b, i] = lab[j]
            reg, n = reg + F.l1_loss(boxes[b, i].float(), ctr[j]), n + 1
    return F.nll_loss(logp.flatten(0, 1), cls_t.flatten()) + reg / n


def sample(gen, b=6, n=14):
    pts, pad = torch.zeros(b, n, 6), torch.ones(b, n, dtype=torch.bool)
    forbidden, targets = torch.zeros(b, NCLS + 1, dtype=torch.bool), []
    for i in range(b):
        bad = int(torch.randint(0, NCLS, (1,), generator=gen))
        forbidden[i, bad] = True
        lab = torch.randint(0, NCLS - 1, (2,), generator=gen)
        lab = lab + (lab >= bad).long()
        ctr = torch.rand(2, 2, generator=gen) * 2 - 1
        c = int(torch.randint(3, 7, (1,), generator=gen))
        for j in range(2):
            pts[i, j * c:(j + 1) * c, :2] = ctr[j] + 0.05 * torch.randn(c, 2, generator=gen)
            pts[i, j * c:(j + 1) * c, 2:] = F.one_hot(lab[j], NCLS).float()
        pad[i, :2 * c] = False
        targets.append((lab, ctr))
    return pts, pad, targets, forbidden


torch.manual_seed(3)
torch.set_num_threads(1)
model = Decoder()
MODULES = [model]
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
watch(*MODULES)
gen = torch.Generator().manual_seed(88)
for step in range(1, 91):
    pts, pad, targets, forbidden = sample(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, boxes = model(pts, pad)
    loss = set_loss(logits, boxes, targets, forbidden)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0:
        print(step, round(loss.item(), 4))
