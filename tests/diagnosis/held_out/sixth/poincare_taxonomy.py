import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(29)


def to_ball(v, r=0.9):
    n = v.norm(dim=-1, keepdim=True).clamp_min(1e-3)
    return r * torch.tanh(n) * v / n


def poincare_dist(u, v):
    sq = (u - v).pow(2).sum(-1)
    den = (1 - u.pow(2).sum(-1)) * (1 - v.pow(2).sum(-1))
    return torch.acosh(1 + 2 * sq / den)  # CAUSE


class Encoder(nn.Module):
    def __init__(self, vocab, dim=8):
        super().__init__()
        self.tok = nn.EmbeddingBag(vocab, 32, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, dim))

    def forward(self, bags):
        return to_ball(self.mlp(self.tok(bags)))


def fermi_dirac(d, radius, temp):
    return torch.sigmoid((radius - d) / temp)


def main():
    gen = torch.Generator().manual_seed(2)
    n_terms, vocab = 60, 200
    words = torch.randint(0, vocab, (n_terms, 6), generator=gen)
    parent = torch.tensor([max(0, (i - 1) // 3) for i in range(n_terms)])
    # children inherit most of the words of their parent
    for i in range(1, n_terms):
        words[i, :4] = words[parent[i], :4]
    enc = model
    opt = torch.optim.Adam(enc.parameters(), lr=4e-3)
    watch(*MODULES)
    for step in range(100):
        child = torch.randint(1, n_terms, (40,), generator=gen)
        neg = (child + torch.randint(5, n_terms - 5, (40,), generator=gen)) % n_terms
        with torch.autocast("cpu", dtype=torch.bfloat16):
            zc, zp, zn = enc(words[child]), enc(words[parent[child]]), enc(words[neg])
            dp, dn = poincare_dist(zc, zp), poincare_dist(zc, zn)
            loss = dp.pow(2).mean() + torch.relu(1.5 - dn).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            with torch.no_grad():
                print(step, "loss", loss.item(), "edge prob", fermi_dirac(dp.float(), 1.0, 0.2).mean().item())


model = Encoder(200)
MODULES = [model]
main()
