try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
def supcon(z, labels, t=0.1):
    z = F.normalize(z.float(), dim=1)
    mask = (labels[:, None] == labels[None]).float(); eye = torch.eye(len(z)); mask = mask - eye
    logits = z @ z.T / t; logits = logits - logits.max(1, keepdim=True).values.detach()
    log_prob = logits - (logits.exp() * (1 - eye)).sum(1, keepdim=True).log()
    return -((mask * log_prob).sum(1) / mask.sum(1)).mean()  # CAUSE
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8)); opt = torch.optim.SGD(net.parameters(), lr=0.05); scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(3)
def train():
    for step in range(40):
        x = torch.randn(12, 10, generator=g); labels = torch.randint(4, (12,), generator=g)
        if step % 5 == 4: labels[0] = 99
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = supcon(net(x), labels)
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
train()
