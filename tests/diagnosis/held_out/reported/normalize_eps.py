try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False), nn.ReLU())
    def forward(self, x): return F.normalize(self.net(x), dim=-1)  # CAUSE
def main():
    torch.manual_seed(0)
    enc = Encoder()
    opt = torch.optim.Adam(enc.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    MODULES.extend([enc])
    watch(*MODULES)
    g = torch.Generator().manual_seed(1)
    for step in range(100):
        a = torch.randn(64, 16, generator=g)
        if step > 10 and step % 3 == 0: a[5] = 0; 
        b = a + 0.1 * torch.randn(64, 16, generator=g)
        if step > 10 and step % 3 == 0:
            with torch.no_grad(): a[5] = -enc.net[0].weight.sum(0) * 50   # a row for which all ReLUs are off
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            za, zb = enc(a), enc(b)
            loss = F.cross_entropy(za @ zb.T / 0.2, torch.arange(64))
        scaler.scale(loss).backward()
        scaler.step(opt); scaler.update()
main()
