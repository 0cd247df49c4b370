import copy
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)


class Counter(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, stride=2, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(c, 1, 4, stride=2, padding=1)

    def forward(self, x):
        return self.up(self.mid(self.down(x)))


class SafeTrainer:
    """goes back to the last good snapshot when a step did not go through"""

    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15)
        self.rollbacks = 0
        self.save()

    def save(self):
        self.good = copy.deepcopy({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "amp": self.scaler.state_dict()})

    def restore(self):
        good = copy.deepcopy(self.good)
        self.net.load_state_dict(good["net"])
        self.opt.load_state_dict(good["opt"])
        self.scaler.load_state_dict(good["amp"])  # CAUSE
        self.rollbacks += 1

    def step(self, img, dens, per_image):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(img)
        err = (out.float() - dens).pow(2)
        loss = err.sum((1, 2, 3)).mean() if per_image else err.mean()
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.restore()
        return loss.item()


def cells(gen, n=6, s=24):
    pos = (torch.rand(n, 1, s, s, generator=gen) < 0.03).float()
    k = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])[None, None]
    blob = nn.functional.conv2d(pos, k / 4, padding=1)
    return blob + 0.1 * torch.randn(n, 1, s, s, generator=gen), 4 * blob


gen = torch.Generator().manual_seed(6)
net = Counter()
MODULES = [net]
trainer = SafeTrainer(net)
watch(*MODULES)
for it in range(70):
    img, dens = cells(gen)
    loss = trainer.step(img, dens, per_image=it >= 24)
    if it % 8 == 7:
        trainer.save()
    if it % 10 == 0:
        print(it, round(loss, 4), trainer.scaler.get_scale(), trainer.rollbacks)
