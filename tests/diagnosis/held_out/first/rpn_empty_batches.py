import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class TinyRPN(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, 2, 1), nn.ReLU())
        self.obj, self.delta = nn.Conv2d(c, 1, 1), nn.Conv2d(c, 4, 1)

    def forward(self, x):
        f = self.body(x)
        return self.obj(f), self.delta(f)


def crops(gen, b=4, size=24):
    img = 0.1 * torch.randn(b, 1, size, size, generator=gen)
    obj, box = torch.zeros(b, 1, 6, 6), torch.zeros(b, 4, 6, 6)
    empty = torch.rand(1, generator=gen) < 0.2
    for i in range(0 if empty else b):
        cy, cx = torch.randint(1, 5, (2,), generator=gen).tolist()
        s = int(torch.randint(2, 5, (1,), generator=gen))
        img[i, 0, cy * 4 - s + 2:cy * 4 + s + 2, cx * 4 - s + 2:cx * 4 + s + 2] += 1
        obj[i, 0, cy, cx] = 1
        box[i, :, cy, cx] = torch.tensor([-s, -s, s, s]) / 4.0
    return img, obj, box


def detection_loss(obj_logit, delta, obj, box):
    cls = F.binary_cross_entropy_with_logits(obj_logit, obj, pos_weight=torch.tensor(6.0))
    pos = obj.bool()
    if not pos.any():
        return cls, delta.sum() * 0.0
    sel = pos.expand_as(delta)
    return cls, F.smooth_l1_loss(delta[sel], box[sel])


class Loop:
    ACCUM = 3

    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=25)
        self.norms, self.idle = [], 0

    def gradient_norm(self):
        inv = 1.0 / self.scaler.get_scale()
        return torch.stack([(p.grad * inv).norm() for p in self.model.parameters() if p.grad is not None]).norm()

    def update(self, micro):
        used = 0
        for img, obj, box in micro:
            if not obj.any() and used == 0:
                continue  # nothing to learn from yet in this window
            with torch.autocast("cpu", dtype=torch.float16):
                o, d = self.model(img)
            cls, reg = detection_loss(o.float(), d.float(), obj, box)
            loss = (cls + reg) / self.ACCUM
            self.scaler.scale(loss).backward()
            used += 1
        if used == 0:
            self.idle += 1
            return None
        self.norms.append(self.gradient_norm().item())
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return cls.item(), reg.item()


torch.manual_seed(100)
torch.set_num_threads(1)
rpn = TinyRPN()
MODULES = [rpn]
loop = Loop(rpn)
watch(*MODULES)
gen = torch.Generator().manual_seed(12)
for it in range(1, 61):
    res = loop.update([crops(gen) for _ in range(Loop.ACCUM)])
    if it % 12 == 0:
        print(it, "cls/reg", res, "grad norm", round(loop.norms[-1], 3), "scale", loop.scaler.get_scale(), "idle", loop.idle)
