"""Disruption warning from plasma diagnostics; the usual train_one_epoch / evaluate split."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(100)

SIGNALS, TIMES = 8, 40


def make_shots(n, seed):
    r = torch.Generator().manual_seed(seed)
    drift = torch.randn(n, SIGNALS, TIMES, generator=r).cumsum(-1) * 0.12
    risky = torch.rand(n, generator=r) < 0.4
    mode = torch.sin(torch.linspace(0, 9, TIMES).square() / 4) * torch.linspace(0, 1.0, TIMES)
    gain = torch.randn(n, 2, 1, generator=r).abs() + 0.2
    drift[:, :2] += risky[:, None, None] * gain * mode
    lead = torch.rand(n, TIMES, generator=r) * 0.02
    target = torch.sigmoid((torch.arange(TIMES) - 22.0) / 3) * risky[:, None] + lead
    return drift + 0.05 * torch.randn(n, SIGNALS, TIMES, generator=r), target.clamp(0, 1)


class CausalNet(nn.Module):
    def __init__(self, width=18):
        super().__init__()
        self.layers = nn.ModuleList()
        c = SIGNALS
        for d in (1, 2, 4):
            self.layers.append(nn.Conv1d(c, width, 3, dilation=d))
            c = width
        self.risk = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        for d, conv in zip((1, 2, 4), self.layers):
            x = F.gelu(conv(F.pad(x, (2 * d, 0))))
        return self.risk(x).squeeze(1)


def train_one_epoch(model, loader, optimizer, clip=5.0):
    model.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)  # CAUSE
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="none").sum(-1).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item() / y.shape[1]
    return total / len(loader), scaler.get_scale()


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    with torch.autocast("cpu", dtype=torch.float16):
        risk = model(x).float().sigmoid()
    alarm = risk.amax(1) > 0.5
    return (alarm == (y.amax(1) > 0.5)).float().mean().item()


def run(epochs=12):
    x, y = make_shots(224, seed=1)
    vx, vy = make_shots(96, seed=2)
    loader = list(zip(x.split(32), y.split(32)))
    model = CausalNet()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        loss, scale = train_one_epoch(model, loader, optimizer)
        print(f"epoch {epoch:2d} loss {loss:.4f} scale {scale:g} alarm accuracy {evaluate(model, vx, vy):.3f}")


if __name__ == "__main__":
    run()
