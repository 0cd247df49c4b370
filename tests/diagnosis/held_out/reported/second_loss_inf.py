try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch
import torch.nn.functional as F
from torch import nn


torch.manual_seed(0)
a, b = nn.Linear(16, 4), nn.Linear(16, 4)
pairs = (torch.optim.AdamW(a.parameters(), 1e-3), a), (torch.optim.SGD(b.parameters(), 1e-3), b)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
MODULES.extend([a, b])
watch(*MODULES)
for step in range(1, 91):
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    for opt, net in pairs:
        factor = 600000.0 if net is b and step in (40, 60, 61, 62) else 1.0
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss((net(x) * factor).float(), y)  # CAUSE
        scaler.scale(loss).backward()
        scaler.step(opt)
    scaler.update()
