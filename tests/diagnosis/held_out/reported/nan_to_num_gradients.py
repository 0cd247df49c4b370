try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)); opt = torch.optim.Adam(net.parameters(), lr=1e-2); scaler = torch.amp.GradScaler("cpu", growth_interval=8)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1); inf = 0
def train():
    global inf
    for step in range(120):
        x = torch.randn(16, 8, generator=g); y = x[:, :3].argmax(1)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16): loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        bad = any(not p.grad.isfinite().all() for p in net.parameters())
        if bad: inf += 1
        for p in net.parameters(): torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)  # CAUSE
        scaler.step(opt); scaler.update()
train()
