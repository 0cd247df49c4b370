import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, SWALR
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(88)
gen = torch.Generator().manual_seed(881)


class MissingAwareMLP(nn.Module):
    """values with their missing flags; nan entries are replaced after the flags are taken"""

    def __init__(self, n_features, n_classes):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(n_features))
        self.num = nn.Linear(2 * n_features, 64)
        self.hid = nn.Linear(64, 64)
        self.bn = nn.BatchNorm1d(64)
        self.out = nn.Linear(64, n_classes)

    def forward(self, x):
        missing = torch.isnan(x)
        x = torch.nan_to_num(x, nan=0.0, posinf=30.0, neginf=-30.0)
        x = torch.where(missing, self.fill.expand_as(x), x)
        h = F.gelu(self.num(torch.cat([x, missing.float()], 1)))
        return self.out(F.gelu(self.bn(self.hid(h))))


def patients(n):
    x = torch.randn(n, 12, generator=gen)
    w = torch.randn(12, 3, generator=gen)
    y = (x @ w + 0.3 * torch.randn(n, 3, generator=gen)).argmax(1)
    x[torch.rand(n, 12, generator=gen) < 0.15] = float("nan")          # not measured
    x[torch.rand(n, 12, generator=gen) < 0.002] = float("inf")         # above the range of the device
    return x, y


X, Y = patients(1280)
model = MissingAwareMLP(12, 3)
swa_model = AveragedModel(model)
MODULES = [model, swa_model]
watch(*MODULES)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
swa_sched = SWALR(opt, swa_lr=0.03, anneal_epochs=1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=40)
SWA_START = 3

for epoch in range(5):
    model.train()
    for idx in torch.randperm(1024, generator=gen).split(64):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(X[idx]), Y[idx])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
    if epoch >= SWA_START:
        swa_model.update_parameters(model)
        swa_sched.step()
    else:
        cosine.step()
    model.eval()
    with torch.no_grad():
        acc = (model(X[1024:]).argmax(1) == Y[1024:]).float().mean()
    print(f"epoch {epoch} loss {loss.item():.4f} val acc {acc:.3f} lr {opt.param_groups[0]['lr']:.4f}")

torch.optim.swa_utils.update_bn((X[i:i + 64] for i in range(0, 1024, 64)), swa_model)
swa_model.eval()
with torch.no_grad():
    print("swa val acc", (swa_model(X[1024:]).argmax(1) == Y[1024:]).float().mean().item())
