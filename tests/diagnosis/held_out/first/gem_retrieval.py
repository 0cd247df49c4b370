"""Instance retrieval: small conv trunk, generalised-mean pooling, proxy softmax."""
import torch
from torch import nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class GeM(nn.Module):
    def __init__(self, p=3.0, eps=1e-6):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))
        self.eps = eps

    def forward(self, x):
        x = x.clamp(min=self.eps)
        x = x.pow(self.p)  # CAUSE
        return F.avg_pool2d(x, x.shape[-2:]).pow(1.0 / self.p).flatten(1)


class Trunk(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.gn = nn.GroupNorm(4, width)
        self.c3 = nn.Conv2d(width, 2 * width, 3, padding=1)
        nn.init.constant_(self.c3.bias, 1.5)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.relu(self.gn(self.c2(x)))
        return F.relu(self.c3(x))


class RetrievalNet(nn.Module):
    def __init__(self, n_cls, dim=32):
        super().__init__()
        self.trunk, self.pool = Trunk(), GeM()
        self.whiten = nn.Linear(64, dim)
        self.proxies = nn.Parameter(torch.randn(n_cls, dim))

    def forward(self, x):
        f = self.whiten(self.pool(self.trunk(x)))
        return 12.0 * F.normalize(f.float(), dim=-1) @ F.normalize(self.proxies, dim=-1).t()


def run(cfg):
    gen = torch.Generator().manual_seed(cfg["data_seed"])
    templates = torch.randn(cfg["classes"], 3, 24, 24, generator=gen)
    net = cfg["net"]
    opt = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=cfg["wd"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    watch(*MODULES)
    skipped = []
    for step in range(1, cfg["steps"] + 1):
        y = torch.randint(0, cfg["classes"], (cfg["batch"],), generator=gen)
        x = templates[y] + 0.7 * torch.randn(cfg["batch"], 3, 24, 24, generator=gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x)
            loss = F.cross_entropy(logits, y, label_smoothing=0.05)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
        if step % 20 == 0:
            print(step, "loss %.4f" % loss.item(), "p %.3f" % net.pool.p.item(), "skipped", len(skipped))


torch.manual_seed(9)
torch.set_num_threads(1)
model = RetrievalNet(10)
MODULES = [model]
run(dict(net=model, classes=10, batch=24, steps=100, lr=0.04, wd=1e-4, data_seed=13))
