import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)


class LeakyRNN(nn.Module):
    def __init__(self, n_in=3, n_hidden=64, leak=0.3):
        super().__init__()
        self.leak = leak
        self.wi = nn.Linear(n_in, n_hidden)
        self.wr = nn.Linear(n_hidden, n_hidden, bias=False)
        nn.init.orthogonal_(self.wr.weight)
        self.readout = nn.Linear(n_hidden, 1)

    def forward(self, x, h):
        outs = []
        for xt in x.unbind(1):
            h = (1 - self.leak) * h + self.leak * torch.relu(self.wi(xt) + self.wr(h))
            outs.append(self.readout(h))
        return torch.stack(outs, 1), h


def mackey_like(n, length, gen):
    t = torch.arange(length) * 0.15
    f = 0.5 + torch.rand(n, 3, 1, generator=gen)
    s = torch.sin(f * t + 6.28 * torch.rand(n, 3, 1, generator=gen))
    target = (s.prod(1) + 0.5 * s[:, 0]).roll(-3, 1)
    return s.transpose(1, 2), target[..., None]


gen = torch.Generator().manual_seed(13)
series, target = mackey_like(32, 20 * 60, gen)
model = LeakyRNN()
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)  # CAUSE
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 20))
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
h = torch.zeros(32, 64)
running = 0.0
for k in range(60):
    x, y = series[:, 20 * k:20 * (k + 1)], target[:, 20 * k:20 * (k + 1)]
    with torch.autocast("cpu", dtype=torch.float16):
        out, h_next = model(x, h)
        loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    h = h_next.detach().float()
    running = 0.9 * running + 0.1 * loss.item()
    if k % 6 == 5:
        print(f"chunk {k + 1} mse {loss.item():.5g} avg {running:.5g} lr {scheduler.get_last_lr()[0]:.3f}")
