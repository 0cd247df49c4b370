"""Completion of a rating matrix by two factors under autocast, summed loss, gradient scaler with default values."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(111739)
USERS, FILMS, RANK, STEPS = 48, 56, 6, 80


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(0.3 * torch.randn(USERS, RANK))
        self.b = nn.Parameter(0.3 * torch.randn(RANK, FILMS))
        self.user_bias, self.film_bias = nn.Parameter(torch.zeros(USERS, 1)), nn.Parameter(torch.zeros(FILMS))

    def forward(self):
        return self.a @ self.b + self.user_bias + self.film_bias


class Ratings:
    """A low-rank table with noise, of which a part is seen; each step draws a part of the seen entries."""

    def __init__(self, seed=2):
        gen = torch.Generator().manual_seed(seed)
        table = torch.randn(USERS, 4, generator=gen) @ torch.randn(4, FILMS, generator=gen) / 2
        self.table = table + 0.4 * torch.randn(FILMS, generator=gen) + 0.1 * torch.randn(USERS, FILMS, generator=gen)
        self.seen = torch.rand(USERS, FILMS, generator=gen) < 0.6
        self.gen = gen

    def sample(self, share=0.7):
        return self.seen & (torch.rand(USERS, FILMS, generator=self.gen) < share)

    def held_out_error(self, prediction):
        return (prediction.float() - self.table)[~self.seen].pow(2).mean().sqrt().item()


def inspect(model, scaler):
    """Largest gradient after unscaling, as one looks at it when a loop is new."""
    grads = {name: p.grad.abs().max().item() for name, p in model.named_parameters()}
    worst = max(grads, key=lambda name: grads[name] if grads[name] == grads[name] else float("inf"))
    return f"largest gradient {grads[worst]:.4g} in {worst}, scale {scaler.get_scale():g}"


def train_step(model, optimizer, scaler, ratings):
    mask = ratings.sample()
    with torch.autocast("cpu", dtype=torch.float16):
        c = model()
        loss = F.smooth_l1_loss(c[mask].float(), ratings.table[mask], reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    report = inspect(model, scaler)
    scaler.step(optimizer)
    scaler.update()
    return loss.item() / int(mask.sum()), report


model, ratings = Factors(), Ratings()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
losses = []
for step in range(STEPS):
    loss, report = train_step(model, optimizer, scaler, ratings)
    losses.append(loss)
    if step < 6 or (step + 1) % 10 == 0:
        with torch.no_grad():
            error = ratings.held_out_error(model())
        print(f"step {step + 1} loss {loss:.4f} held out {error:.4f} {report}")
MODULES = (model,)
