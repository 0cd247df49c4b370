import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(67)
STATES, FEATS, NEG = 7, 8, float("-inf")


class BandedHMM(nn.Module):
    """a state may stay or move on by at most two; every state may come first"""

    def __init__(self):
        super().__init__()
        self.emit = nn.Sequential(nn.Linear(FEATS, 64), nn.Tanh(), nn.Linear(64, STATES))
        self.trans = nn.Parameter(torch.zeros(STATES, STATES))
        self.start = nn.Parameter(torch.zeros(STATES))
        step = (torch.arange(STATES)[None] - torch.arange(STATES)[:, None]) % STATES
        self.register_buffer("forbidden", step > 2)

    def scores(self, x):
        e = self.emit(x).float().log_softmax(-1)
        t = self.trans.masked_fill(self.forbidden, NEG).log_softmax(-1)
        return e, t, self.start.log_softmax(-1)

    def log_z(self, e, t, s):
        alpha = s + e[:, 0]
        for k in range(1, e.size(1)):
            alpha = torch.logsumexp(alpha[:, :, None] + t, dim=1) + e[:, k]
        return torch.logsumexp(alpha, -1)

    def path_score(self, e, t, s, z):
        em = e.gather(2, z[:, :, None]).squeeze(-1).sum(1)
        return em + s[z[:, 0]] + t[z[:, :-1], z[:, 1:]].sum(1)

    @torch.no_grad()
    def viterbi(self, e, t, s):
        best, back = s + e[:, 0], []
        for k in range(1, e.size(1)):
            v, i = (best[:, :, None] + t).max(1)
            back.append(i)
            best = v + e[:, k]
        z = [best.argmax(-1)]
        for i in reversed(back):
            z.append(i.gather(1, z[-1][:, None]).squeeze(1))
        return torch.stack(z[::-1], 1)


gen = torch.Generator().manual_seed(15)
means = torch.randn(STATES, FEATS, generator=gen)


def sequences(n=16, length=14):
    z = torch.randint(0, STATES, (n, 1), generator=gen)
    moves = torch.randint(0, 3, (n, length - 1), generator=gen)
    z = torch.cat([z, z + moves.cumsum(1)], 1) % STATES
    return means[z] + 0.8 * torch.randn(n, length, FEATS, generator=gen), z


hmm = BandedHMM()
MODULES = [hmm]
opt = torch.optim.Adam(hmm.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
watch(*MODULES)

for it in range(60):
    x, z = sequences()
    with torch.autocast("cpu", dtype=torch.float16):
        e, t, s = hmm.scores(x)
        loss = (hmm.log_z(e, t, s) - hmm.path_score(e, t, s, z)).mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_value_(hmm.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 15 == 0:
        acc = (hmm.viterbi(e.detach(), t.detach(), s.detach()) == z).float().mean()
        print(f"{it:3d} nll {loss.item():.3f} acc {acc.item():.3f} min trans {t.min().item()}")
