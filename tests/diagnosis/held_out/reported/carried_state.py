try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
class Cell(nn.Module):
    def __init__(self): super().__init__(); self.i, self.h, self.o = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)
    def forward(self, x, h):
        for t in range(x.shape[1]): h = F.relu(self.i(x[:, t]) + self.h(h))  # CAUSE
        return self.o(h), h
net = Cell(); opt = torch.optim.Adam(net.parameters(), lr=1e-3); scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1)
def train():
    hidden = torch.zeros(4, 32)
    for step in range(60):
        x = torch.randn(4, 5, 8, generator=g); y = x.sum((1, 2))[:, None] * 0.1
        if step == 20: x = x * 1e5           # one clip with a broken exposure
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out, hidden = net(x, hidden.detach())
            loss = F.mse_loss(out, y)
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
train()
