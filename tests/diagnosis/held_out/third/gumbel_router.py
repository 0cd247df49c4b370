import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1234)
noise_gen = torch.Generator().manual_seed(77)
data_gen = torch.Generator().manual_seed(78)


def sample_gumbel(ref, eps=1e-20):
    u = torch.rand(ref.shape, generator=noise_gen).to(ref)  # CAUSE
    return -torch.log(eps - torch.log(u + eps))  # CAUSE


class SlotRouter(nn.Module):
    """Hard assignment of tokens to slots with straight-through Gumbel samples."""

    def __init__(self, dim=32, slots=6, tau=0.7):
        super().__init__()
        self.tau = tau
        self.slots = nn.Parameter(torch.randn(slots, dim) * 0.3)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        logits = self.k(x) @ self.q(self.slots).t() * x.size(-1) ** -0.5
        if self.training:
            logits = logits + sample_gumbel(logits)
        soft = F.softmax(logits / self.tau, dim=-1)
        hard = F.one_hot(soft.argmax(-1), soft.size(-1)).to(soft.dtype)
        a = hard - soft.detach() + soft
        return a.transpose(1, 2) @ self.v(x) / (a.sum(1).unsqueeze(-1) + 1.0)


class GroupingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(50, 32)
        self.router = SlotRouter()
        self.dec = nn.Linear(32 * 6, 50)

    def forward(self, ids):
        return self.dec(self.router(self.tok(ids)).flatten(1))


net = GroupingNet()
MODULES = [net]
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
watch(*MODULES)
losses = []
for step in range(1, 81):
    ids = torch.randint(0, 50, (8, 12), generator=data_gen)
    bag = F.one_hot(ids, 50).amax(1).float()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(ids)
        loss = F.binary_cross_entropy_with_logits(out.float(), bag)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    losses.append(loss.item())
net.eval()
with torch.no_grad():
    print(sum(losses[-10:]) / 10, net(ids).sigmoid().mean().item())
