"""Iterative box refinement head, one query per object."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)
gen = torch.Generator().manual_seed(5)


def inverse_sigmoid(x, eps=1e-5):
    x = x.clamp(min=0, max=1)
    x1 = x.clamp(min=eps)
    x2 = (1 - x).clamp(min=eps)
    return torch.log(x1 / x2)  # CAUSE


class RefineHead(nn.Module):
    def __init__(self, dim=48, layers=3):
        super().__init__()
        self.inp = nn.Linear(32, dim)
        self.ref = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.deltas = nn.ModuleList(nn.Linear(dim, 4) for _ in range(layers))
        for d in self.deltas:
            nn.init.zeros_(d.bias)
            nn.init.normal_(d.weight, std=0.01)

    def forward(self, feats, proposals):
        h = self.inp(feats)
        boxes = proposals.to(h.dtype)
        outs = []
        for blk, norm, delta in zip(self.blocks, self.norms, self.deltas):
            h = norm(h + blk(h + self.ref(boxes))).to(h.dtype)
            logit = inverse_sigmoid(boxes) + delta(h)
            outs.append(logit)
            boxes = logit.sigmoid().detach()
        return outs


def make_batch(step):
    feats = torch.randn(24, 32, generator=gen)
    gt = torch.rand(24, 4, generator=gen) * 0.6 + 0.2
    gt = gt + 0.05 * feats[:, :4].tanh()
    noise = 0.08 * torch.randn(24, 4, generator=gen)
    if step % 9 == 7:
        gt[:3, 2:] = 1.0            # object fills the whole crop
        noise[:3] = noise[:3].abs()
    return feats, (gt + noise).clamp(0, 1), gt


head = RefineHead()
MODULES = [head]
watch(*MODULES)
optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)

for it in range(60):
    feats, proposals, gt = make_batch(it)
    with torch.autocast("cpu", dtype=torch.float16):
        preds = head(feats, proposals)
        loss = sum(F.l1_loss(p.float().sigmoid(), gt) + 0.02 * F.smooth_l1_loss(p.float(), inverse_sigmoid(gt)) for p in preds)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(head.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if it % 20 == 0:
        print(it, loss.item(), scaler.get_scale())
