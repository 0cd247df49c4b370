"""A small language model of opcode traces, trained with Sophia-G: every K steps the diagonal of the Gauss-Newton
matrix is estimated from labels that the model samples itself."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)

VOCAB, CTX, DIM, BATCH = 40, 24, 48, 12
STEPS, K = 90, 10


class SophiaG(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.92, 0.97), rho=0.04, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay))

    def _state(self, p):
        s = self.state[p]
        if not s:
            s["m"], s["h"] = torch.zeros_like(p), torch.zeros_like(p)
        return s

    @torch.no_grad()
    def update_hessian(self, bs):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._state(p)["h"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=bs * (1 - group["betas"][1]))  # CAUSE

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self._state(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                s["m"].mul_(group["betas"][0]).add_(p.grad, alpha=1 - group["betas"][0])
                ratio = (s["m"].abs() / (group["rho"] * s["h"] + 1e-15)).clamp(max=1)
                p.addcmul_(s["m"].sign(), ratio, value=-group["lr"])


class TraceLM(nn.Module):
    """Causal mixing of the last tokens by a depthwise convolution, then a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.ModuleList(nn.Conv1d(DIM, DIM, 4, groups=4) for _ in range(2))
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))
                                for _ in range(2))
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for mix, ff in zip(self.mix, self.ff):
            x = x + mix(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
            x = x + ff(x)
        return self.out(self.norm(x))


gen = torch.Generator().manual_seed(6)
follow = torch.randint(VOCAB, (VOCAB, 2), generator=gen)


def traces():
    while True:
        ids = torch.randint(VOCAB, (BATCH, 1), generator=gen)
        for _ in range(CTX):
            pick = (torch.rand(BATCH, 1, generator=gen) < 0.8).long()
            ids = torch.cat([ids, follow[ids[:, -1:], 1 - pick].view(BATCH, 1)], 1)
        yield ids[:, :-1], ids[:, 1:]


model = TraceLM()
watch(model)
optimizer = SophiaG(model.parameters(), lr=3e-3, rho=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=500)
data = traces()

for it in range(STEPS):
    x, y = next(data)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

    if it % K == K - 1:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x).float().flatten(0, 1)
            sampled = torch.distributions.Categorical(logits=logits.detach()).sample()
            loss_sampled = F.cross_entropy(logits, sampled)
        scaler.scale(loss_sampled).backward()
        optimizer.update_hessian(bs=x.numel())
        optimizer.zero_grad(set_to_none=True)
        print(f"{it:3d} loss {loss.item():.4f}")
