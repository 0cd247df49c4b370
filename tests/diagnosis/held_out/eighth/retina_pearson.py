"""Predict calcium responses of 24 neurons from a stimulus movie; trained on the correlation over time."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1)
gen = torch.Generator().manual_seed(11)
NEURONS, T, PIX = 24, 40, 36
FILTERS = torch.randn(PIX, NEURONS, generator=gen) / 6
THRESH = torch.linspace(0.05, 0.3, NEURONS)


class Core(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Linear(PIX, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, NEURONS)

    def forward(self, movie):
        h, _ = self.rnn(F.elu(self.embed(movie)))
        return F.softplus(self.readout(h))


def trial_block(index, n=8):
    contrast = 0.25 if index % 37 == 0 else 1.0
    movie = contrast * torch.randn(n, T, PIX, generator=gen)
    drive = movie @ FILTERS
    drive = 0.7 * drive + 0.3 * torch.roll(drive, 1, dims=1)
    return movie, F.relu(drive - THRESH)


def correlation(pred, resp):
    p = pred - pred.mean(1, keepdim=True)
    r = resp - resp.mean(1, keepdim=True)
    return (p * r).sum(1) / (p.norm(dim=1) * r.norm(dim=1))  # CAUSE


class Fitter:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.history = []

    def fit(self, blocks):
        for b in range(1, blocks + 1):
            movie, resp = trial_block(b)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = self.model(movie)
            loss = (1 - correlation(pred.float(), resp)).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.history.append(loss.item())
            if b % 15 == 0:
                print(f"block {b} 1-r {self.history[-1]:.4f}")


core = Core()
MODULES = [core]
watch(*MODULES)
Fitter(core).fit(90)
