"""Braille cells from touch images: letter and pressure heads share a trunk, conflicting gradients are projected."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(12)
touch = torch.Generator().manual_seed(121)

LETTERS = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0],
                        [1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0]]).float()


def fingertip(n):
    label = torch.randint(0, len(LETTERS), (n,), generator=touch)
    press = 0.3 + torch.rand(n, generator=touch)
    canvas = torch.zeros(n, 1, 12, 8)
    dots = LETTERS[label].view(n, 1, 3, 2)
    canvas[:, :, 1::4, 1::4] = dots * press.view(-1, 1, 1, 1)
    canvas = F.avg_pool2d(canvas, 3, stride=1, padding=1) * 6
    return canvas + 0.1 * torch.randn(canvas.shape, generator=touch), label, press


class Touch(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                   nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
                                   nn.Linear(width * 24, 48), nn.ReLU())
        self.letter, self.press = nn.Linear(48, len(LETTERS)), nn.Linear(48, 1)

    def forward(self, img):
        h = self.trunk(img)
        return self.letter(h), self.press(h).squeeze(1)


model = Touch()
watch(model)
params = list(model.parameters())
opt = torch.optim.Adam(params, lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=12)


def flat(grads):
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, grads)])


def project(a, b):
    """Removes from a the part that works against b."""
    against = torch.dot(a, b).clamp(max=0) / b.square().sum()
    return a - against * b, bool(against < 0)


conflicts = 0
for step in range(90):
    img, label, press = fingertip(32)
    with torch.autocast("cpu", dtype=torch.float16):
        letter, force = model(img)
    losses = F.cross_entropy(letter.float(), label), 4 * F.mse_loss(force.float(), press)
    g1 = flat(torch.autograd.grad(scaler.scale(losses[0]), params, retain_graph=True, allow_unused=True))
    g2 = flat(torch.autograd.grad(scaler.scale(losses[1]), params, allow_unused=True))
    (p1, c1), (p2, c2) = project(g1, g2), project(g2, g1)
    conflicts += c1 or c2
    offset = 0
    for p in params:
        p.grad = (p1 + p2)[offset:offset + p.numel()].view_as(p).clone()
        offset += p.numel()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(f"{step:2d} letter {losses[0].item():.3f} press {losses[1].item():.3f} "
              f"conflicts {conflicts} scale {scaler.get_scale():g}")
