try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)); opt = torch.optim.Adam(net.parameters(), lr=1e-2)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1); centers = torch.randn(3, 8, generator=g) * 0.6
def train():
    for step in range(80):
        a = centers[[0, 1, 2] * 4] + 0.1 * torch.randn(12, 8, generator=g); p = centers[[0, 1, 2] * 4] + 0.1 * torch.randn(12, 8, generator=g); n = centers[[1, 2, 0] * 4] + 0.1 * torch.randn(12, 8, generator=g)
        with torch.autocast("cpu", dtype=torch.bfloat16): ea, ep, en = net(a), net(p), net(n)
        d = F.relu(F.pairwise_distance(ea.float(), ep.float()) - F.pairwise_distance(ea.float(), en.float()) + 1.0)
        loss = d[d > 0].mean()  # CAUSE
        opt.zero_grad(); loss.backward(); opt.step()
train()
