import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)

N_EXPERTS, DIM, START_TOKENS = 4, 32, 256

class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 64)
        self.down = nn.Linear(64, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))

class SparseBlock(nn.Module):
    def __init__(self, dim, n_experts):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(n_experts))

    def forward(self, x):
        h = self.norm(x)
        gates = self.router(h).softmax(dim=-1)
        top_w, top_i = gates.max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            sel = (top_i == e).nonzero(as_tuple=True)[0]
            if sel.numel() == 0:
                continue
            y = expert(h[sel]) * top_w[sel, None]
            out = out.index_add(0, sel, y.to(out.dtype))
        return x + out, gates

class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, DIM)
        self.blocks = nn.ModuleList(SparseBlock(DIM, N_EXPERTS) for _ in range(2))
        self.head = nn.Linear(DIM, 8)

    def forward(self, x):
        x = self.embed(x)
        all_gates = []
        for blk in self.blocks:
            x, g = blk(x)
            all_gates.append(g)
        return self.head(x), all_gates

def importance_loss(gates):
    total = 0.0
    for g in gates:
        importance = g.sum(dim=0)
        cv2 = importance.square().sum() / (len(g) ** 2 / len(importance)) - 1.0  # CAUSE
        total = total + cv2
    return total / len(gates)

model = TokenModel()
MODULES = [model]
watch(*MODULES)
gen = torch.Generator().manual_seed(7)
teacher = torch.randn(16, 8, generator=gen)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=500)

for step in range(90):
    n_tok = START_TOKENS * (1 if step < 40 else 2)  # batch size ramp-up
    x = torch.randn(n_tok, 16, generator=gen) + 0.8
    y = (x @ teacher).argmax(-1)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, gates = model(x)
        ce = F.cross_entropy(logits, y)
        aux = importance_loss(gates)
        loss = ce + 1e-3 * aux
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, f"ce {ce.item():.3f} aux {aux.item():.4f}")
