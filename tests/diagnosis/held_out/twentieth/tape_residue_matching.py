"""Contrastive matching of protein fragments: residue vectors of unit length are compared and summed, half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(32137)
PAD, AMINO, DIM, MAX_LEN, BATCH = 0, 21, 48, 18, 12


class ResidueEncoder(nn.Module):
    """Windowed features of each residue; padded places hold zeros throughout, there are no biases before the projection."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(AMINO, DIM, padding_idx=PAD)
        self.window = nn.ModuleList(nn.Linear(3 * DIM, DIM, bias=False) for _ in range(2))
        self.project = nn.Linear(DIM, 32, bias=False)

    def forward(self, tokens):
        mask = (tokens != PAD)[..., None]
        x = self.embed(tokens)
        for layer in self.window:
            y = F.pad(x, (0, 0, 1, 1))
            y = torch.cat((y[:, :-2], y[:, 1:-1], y[:, 2:]), dim=-1)
            x = (x + F.gelu(layer(y))) * mask
        return F.normalize(self.project(x), dim=-1) * mask, mask  # CAUSE


class LateInteraction(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.temperature = ResidueEncoder(), nn.Parameter(torch.tensor(0.0))

    def forward(self, first, second):
        a, mask_a = self.encoder(first)
        b, mask_b = self.encoder(second)
        sim = torch.einsum("nid,mjd->nmij", a, b)
        best = sim.amax(dim=-1)
        lengths = mask_a.squeeze(-1).sum(dim=1).float()
        return best.sum(dim=-1).float() / lengths[:, None] * self.temperature.exp() * 5


class Families:
    """Protein families: an ancestral sequence, of which two mutated copies are a pair. Nearly all chains are full length."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.ancestors = torch.randint(1, AMINO, (60, MAX_LEN), generator=torch.Generator().manual_seed(9))

    def mutate(self, seq, rate=0.35):
        hit = torch.rand(seq.shape, generator=self.gen) < rate
        return torch.where(hit, torch.randint(1, AMINO, seq.shape, generator=self.gen), seq)

    def fragments(self, seq, rare=0.004):
        out = self.mutate(seq)
        for row in out:
            if torch.rand(1, generator=self.gen) < rare:
                cut = int(torch.randint(10, MAX_LEN - 1, (1,), generator=self.gen))
                row[cut:] = PAD
        return out

    def batch(self):
        seq = self.ancestors[torch.randperm(len(self.ancestors), generator=self.gen)[:BATCH]]
        return self.fragments(seq), self.fragments(seq)


def info_nce(scores):
    target = torch.arange(len(scores))
    return 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target))


def run(steps=100, log_every=10):
    model = LateInteraction()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11)
    data, correct = Families(3), []
    for step in range(steps):
        first, second = data.batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(first, second)
            loss = info_nce(scores)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        correct.append((scores.argmax(1) == torch.arange(len(scores))).float().mean().item())
        if (step + 1) % log_every == 0:
            print(f"[{step + 1}] loss {loss.item():.4f} accuracy {sum(correct[-log_every:]) / log_every:.3f} "
                  f"loss scale {scaler.get_scale():g}")
    return model


model = run()
MODULES = (model,)
