import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)
# BIO tags for two entity types: O, B-x, I-x, B-y, I-y
TAGS = ["O", "B-x", "I-x", "B-y", "I-y"]
ALLOWED = torch.ones(5, 5, dtype=torch.bool)
for i, a in enumerate(TAGS):
    for j, b in enumerate(TAGS):
        if b.startswith("I") and a[1:] != b[1:]:
            ALLOWED[i, j] = False
START = torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf])      # no sentence starts inside an entity


class CRFTagger(nn.Module):
    def __init__(self, feat):
        super().__init__()
        self.emit = nn.Sequential(nn.Linear(feat, 24), nn.Tanh(), nn.Linear(24, 5))
        self.trans = nn.Parameter(torch.zeros(5, 5))

    def neg_log_lik(self, x, tags):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            e = self.emit(x)
        e = e.float()
        trans = self.trans.masked_fill(~ALLOWED, -torch.inf)
        alpha = START + e[:, 0]
        gold = e[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + trans, 1) + e[:, t]
            gold = gold + trans[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
        return (torch.logsumexp(alpha, 1) - gold).mean()


def sentences(n, length, gen):
    tags = torch.zeros(n, length, dtype=torch.long)
    for k in range(n):
        t = 0
        while t < length:
            if torch.rand((), generator=gen) < 0.35:
                kind, span = int(torch.randint(0, 2, (1,), generator=gen)), int(torch.randint(1, 4, (1,), generator=gen))
                tags[k, t] = 1 + 2 * kind
                tags[k, t + 1:t + span] = 2 + 2 * kind
                t += span
            t += 1
    proto = torch.randn(5, 10, generator=gen)
    return proto[tags] + 1.2 * torch.randn(n, length, 10, generator=gen), tags


gen = torch.Generator().manual_seed(131)
x, tags = sentences(60, 11, gen)
tagger = CRFTagger(10)
MODULES = [tagger]


def main():
    watch(*MODULES)
    opt = torch.optim.LBFGS(tagger.parameters(), lr=0.4, max_iter=2, history_size=6)
    for it in range(30):
        idx = slice(0, 40)

        def closure():
            opt.zero_grad()
            loss = tagger.neg_log_lik(x[idx], tags[idx]) + 1e-2 * sum(p.square().sum() for p in tagger.parameters())
            loss.backward()
            return loss

        before = opt.step(closure)
        if it % 5 == 4:
            with torch.no_grad():
                print(f"{it + 1:2d} train {before.item():.4f} held out {tagger.neg_log_lik(x[40:], tags[40:]).item():.4f}")


main()
