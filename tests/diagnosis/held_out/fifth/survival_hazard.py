"""Discrete-time survival model: follow-up in months, hazards per interval."""
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)
BINS = 8


def nll_discrete(logits, duration, event, eps=1e-7):
    h = torch.sigmoid(logits)  # CAUSE
    survive = (1 - h).clamp(min=0)  # CAUSE
    idx = torch.arange(BINS)
    before = (idx[None] < duration[:, None]).to(logits.dtype)
    at = nn.functional.one_hot(duration, BINS).to(logits.dtype)
    log_s = torch.log(survive)
    ll_before = torch.where(before.bool(), log_s, torch.zeros_like(log_s)).sum(1)
    log_h, log_c = torch.log(h + eps), log_s
    ll_at = torch.where(event[:, None], log_h, log_c)
    return -(ll_before + torch.where(at.bool(), ll_at, torch.zeros_like(ll_at)).sum(1)).float().mean()


class Hazards(nn.Module):
    def __init__(self):
        super().__init__()
        self.genes = nn.Embedding(50, 16)
        self.mlp = nn.Sequential(nn.Linear(16 + 5, 48), nn.LeakyReLU(0.1), nn.Linear(48, 32), nn.LeakyReLU(0.1), nn.Linear(32, BINS))

    def forward(self, gene, clinical):
        return self.mlp(torch.cat([self.genes(gene).mean(1), clinical], 1))


def cohort(gen, i, n=32):
    gene = torch.randint(0, 50, (n, 6), generator=gen)
    clin = torch.randn(n, 5, generator=gen)
    if i % 10 == 6:
        clin[0] = clin[0].sign() * 110.0         # lab value in other units
        clin[1] = -clin[0]
    risk = clin[:, 0].clamp(-2, 2)
    duration = ((2.5 - risk) * 1.6 * torch.rand(n, generator=gen)).long().clamp(0, BINS - 1)
    if i % 10 == 6:
        duration[:2] = BINS - 1
    event = torch.rand(n, generator=gen) < 0.7
    return gene, clin, duration, event


def main():
    model = Hazards()
    MODULES.append(model)
    watch(*MODULES)
    gen = torch.Generator().manual_seed(190)
    opt = torch.optim.RAdam(model.parameters(), lr=1e-2)
    for i in range(60):
        gene, clin, duration, event = cohort(gen, i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nll_discrete(model(gene, clin), duration, event)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            print("skipping batch", i)
            continue
        opt.step()
    print("nll", loss.item())


MODULES = []
main()
