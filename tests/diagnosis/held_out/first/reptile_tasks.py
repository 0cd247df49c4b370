import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(18)


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.net(x)).squeeze(-1)


class TaskFamily:
    """flight delay in minutes as a function of hour, day and load factor, one task per airport"""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def sample(self):
        w = torch.randn(3, generator=self.gen)
        amp = 60 + 60 * torch.rand(1, generator=self.gen)
        def draw(n):
            x = torch.randn(n, 3, generator=self.gen)
            return x, amp * (1.2 + torch.sin(x @ w + x[:, 0]))
        return draw


meta, fast = Regressor(), Regressor()
MODULES = [meta, fast]
tasks = TaskFamily(181)


def adapt(net, draw, inner_steps=5):
    """inner loop: fresh optimiser and fresh AMP state for every task"""
    opt = torch.optim.Adam(net.parameters(), lr=2e-2, betas=(0.0, 0.999))
    scaler = torch.amp.GradScaler("cpu")  # CAUSE
    for _ in range(inner_steps):
        x, y = draw(32)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return loss.item() / 32


def meta_train(n_tasks=24, eps=0.5):
    watch(*MODULES)
    hist = []
    for task in range(n_tasks):
        draw = tasks.sample()
        fast.load_state_dict(meta.state_dict())
        hist.append(adapt(fast, draw))
        with torch.no_grad():
            for m, f in zip(meta.parameters(), fast.parameters()):
                m.lerp_(f, eps * (1 - task / n_tasks))
        if task % 4 == 3:
            print(f"task {task + 1}: mse after adaptation {sum(hist[-4:]) / 4:.1f}")


meta_train()
