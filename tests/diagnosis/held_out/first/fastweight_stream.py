import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class FastWeightLayer(nn.Module):
    """linear attention with a decaying associative state that is handed from segment to segment"""

    def __init__(self, dim, dk=12, dv=12):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, n, bias=False) for n in (dk, dk, dv))
        self.decay = nn.Parameter(torch.full((dk, 1), 1.5))
        self.norm = nn.LayerNorm(dv)
        self.out = nn.Linear(dv, dim)

    def forward(self, x, state):
        outs = []
        lam = torch.sigmoid(self.decay)
        for t in range(x.shape[1]):
            q, k, v = self.q(x[:, t]), self.k(x[:, t]), self.v(x[:, t])
            state = lam * state + k.unsqueeze(2) * v.unsqueeze(1)  # CAUSE
            read = (q.unsqueeze(2) * state).sum(1)
            outs.append(x[:, t] + self.out(self.norm(read)))
        return torch.stack(outs, 1), state


class Streamer(nn.Module):
    def __init__(self, channels=4, dim=24):
        super().__init__()
        self.inp = nn.Linear(channels, dim)
        self.fw = FastWeightLayer(dim)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, channels))

    def init_state(self, batch):
        return torch.zeros(batch, 12, 12)

    def forward(self, x, state):
        y, state = self.fw(self.inp(x), state)
        return self.out(y), state


def recording(n_steps, batch, gen):
    t = torch.arange(n_steps).float()
    f = 0.05 + 0.1 * torch.rand(batch, 1, 4, generator=gen)
    sig = torch.sin(6.28 * f * t[None, :, None]) + 0.05 * torch.randn(batch, n_steps, 4, generator=gen)
    sig[5, 611, :] = torch.tensor([900.0, -900.0, 900.0, 0.0])       # electrode came loose for one sample
    return sig


torch.manual_seed(6)
gen = torch.Generator().manual_seed(66)
net = Streamer()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
data = recording(16 * 70 + 1, 8, gen)
state = net.init_state(8)
running = None

for seg in range(70):
    x = data[:, 16 * seg: 16 * seg + 16]
    y = data[:, 16 * seg + 1: 16 * seg + 17]
    state = state.detach()  # CAUSE
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred, state = net(x, state)  # CAUSE
        loss = nn.functional.smooth_l1_loss(pred, y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
    if seg % 7 == 6:
        print(f"seg {seg} loss {loss.item():.4f} avg {running:.4f} |S| {state.abs().max().item():.2f}")
