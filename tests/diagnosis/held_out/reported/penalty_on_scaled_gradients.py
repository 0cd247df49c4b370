try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)); opt = torch.optim.SGD(net.parameters(), lr=0.05); scaler = torch.amp.GradScaler("cpu")
def updateBN(model, s=0.02):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d): m.weight.grad.data.add_(s * torch.sign(m.weight.data))  # CAUSE
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1)
def train():
    for step in range(120):
        x = torch.randn(16, 10, generator=g); y = (x[:, 0] > 0).long()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16): loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward(); updateBN(net); scaler.step(opt); scaler.update()
train()
