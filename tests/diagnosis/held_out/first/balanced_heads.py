import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class LossBalancer(nn.Module):
    """divides each task loss by its debiased running mean, after a few warm-up steps"""

    def __init__(self, n_tasks, decay=0.999, warmup=15):
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("avg", torch.zeros(n_tasks))
        self.t, self.warmup = 0, warmup

    def forward(self, losses):
        losses = torch.stack(losses)
        self.t += 1
        self.avg.mul_(self.decay).add_((1 - self.decay) * losses.detach())  # CAUSE
        if self.t <= self.warmup:
            return losses.sum()
        mean = self.avg / (1 - self.decay ** self.t)  # CAUSE
        return (losses / mean).sum() / len(losses)


class SharedTrunk(nn.Module):
    def __init__(self, n_in, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.depth = nn.Linear(width, 1)
        self.segm = nn.Linear(width, 4)
        self.normal = nn.Linear(width, 3)
        self.balance = LossBalancer(3)

    def forward(self, x, targets):
        h = self.trunk(x)
        d, c, n = targets
        l_depth = F.l1_loss(self.depth(h).squeeze(1), d)
        l_segm = F.cross_entropy(self.segm(h), c)
        l_normal = (1 - F.cosine_similarity(self.normal(h), n, dim=1)).mean()
        return self.balance([l_depth, l_segm, l_normal]), (l_depth, l_segm, l_normal)


class Trainer:
    def __init__(self, net, lr, seed):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.gen = torch.Generator().manual_seed(seed)
        self.wd, self.wc, self.wn = (torch.randn(20, k, generator=self.gen) for k in (1, 4, 3))
        self.global_step = 0

    def batch(self):
        x = torch.randn(64, 20, generator=self.gen)
        d = (x @ self.wd).squeeze(1).abs()
        return x, d, (x @ self.wc).argmax(1), torch.tanh(x @ self.wn)

    def training_step(self):
        x, d, c, n = self.batch()
        dt = next(self.net.parameters()).dtype
        loss, parts = self.net(x.to(dt), (d.to(dt), c, n.to(dt)))
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.global_step += 1
        return loss.item(), [p.item() for p in parts]

    def run(self, steps):
        for _ in range(steps):
            loss, parts = self.training_step()
            if self.global_step % 10 == 0:
                print(self.global_step, f"{loss:.4f}", ["%.3f" % p for p in parts])


torch.set_num_threads(1)
torch.manual_seed(17)
net = SharedTrunk(20, 48)
net = net.bfloat16()  # CAUSE
MODULES = [net]
watch(*MODULES)
Trainer(net, lr=0.02, seed=170).run(60)
