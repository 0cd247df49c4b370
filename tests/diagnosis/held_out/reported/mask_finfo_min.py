try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn, torch.nn.functional as F
class Attn(nn.Module):
    def __init__(self, d=16): super().__init__(); self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
    def forward(self, x, mask):
        s = self.q(x) @ self.k(x).transpose(1, 2) + mask
        return s.softmax(-1) @ self.v(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.emb = nn.Embedding(20, 16); self.attn = Attn(); self.head = nn.Linear(16, 20)
        with torch.no_grad(): self.emb.weight *= 14
    def forward(self, ids, pad, dt=torch.float16):
        T = ids.shape[1]; low = torch.finfo(dt).min
        causal = torch.full((T, T), low, dtype=dt).triu(1)
        padding = torch.zeros(ids.shape[0], 1, T, dtype=dt).masked_fill(pad[:, None], low)
        return self.head(self.attn(self.emb(ids), causal + padding))  # CAUSE
net = Net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-3); scaler = torch.amp.GradScaler("cpu", init_scale=256.)
MODULES.extend([net])
watch(*MODULES)
g = torch.Generator().manual_seed(1)
def train():
    for step in range(40):
        ids = torch.randint(1, 20, (8, 6), generator=g); pad = torch.zeros(8, 6, dtype=torch.bool)
        if step % 4 == 3: pad[:, :2] = True
        with torch.autocast("cpu", dtype=torch.float16): logits = net(ids, pad)
        keep = ~pad; loss = F.cross_entropy(logits.float()[keep], ids[keep])
        opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
train()
