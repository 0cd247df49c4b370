"""Small detector with an averaged copy; at the end the saved weights are stripped and halved, then evaluated."""
import copy
import io
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(151)


def conv(cin, cout, s=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, s, 1, bias=False), nn.BatchNorm2d(cout, eps=1e-3, momentum=0.03), nn.SiLU())


class Model(nn.Module):
    def __init__(self, classes=3, c=12):
        super().__init__()
        self.backbone = nn.Sequential(conv(3, c, 2), conv(c, 2 * c, 2), conv(2 * c, 2 * c))
        self.detect = nn.Conv2d(2 * c, 1 + classes, 1)
        with torch.no_grad():
            self.detect.bias[0] = -math.log(60)

    def forward(self, x):
        return self.detect(self.backbone(x))


class ModelEMA:
    def __init__(self, model, decay=0.99):
        self.ema, self.updates = copy.deepcopy(model).eval(), 0
        self.decay = lambda x: decay * (1 - math.exp(-x / 20))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d, msd = self.decay(self.updates), model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v.mul_(d).add_((1 - d) * msd[k])


def images(gen, n=8, size=32):
    x = 0.3 * torch.rand(n, 3, size, size, generator=gen)
    obj, cls = torch.zeros(n, size // 4, size // 4), torch.zeros(n, size // 4, size // 4, dtype=torch.long)
    for i in range(n):
        for _ in range(2):
            c, gx, gy = (int(torch.randint(0, m, (), generator=gen)) for m in (3, 8, 8))
            x[i, c, 4 * gy:4 * gy + 4, 4 * gx:4 * gx + 4] += 0.6
            obj[i, gy, gx], cls[i, gy, gx] = 1, c
    return x, obj, cls


def compute_loss(p, obj, cls):
    p = p.float()
    lobj = F.binary_cross_entropy_with_logits(p[:, 0], obj)
    lcls = F.cross_entropy(p[:, 1:].permute(0, 2, 3, 1)[obj > 0], cls[obj > 0])
    return (lobj + 0.5 * lcls) * len(p), lobj.item(), lcls.item()


def strip_optimizer(file):
    """Keeps the averaged model only, in FP16."""
    x = torch.load(file, weights_only=False)
    x["model"], x["ema"], x["optimizer"] = x["ema"].half(), None, None
    for p in x["model"].parameters():
        p.requires_grad = False
    out = io.BytesIO()
    torch.save(x, out)
    out.seek(0)
    return out


@torch.no_grad()
def val(model, gen, half=False):
    x, obj, cls = images(gen, 64)
    p = model(x.half() if half else x).float()
    found = (p[:, 0] > 0) & (obj > 0)
    return found.sum().item() / obj.sum().item(), (p[:, 1:].argmax(1) == cls)[obj > 0].float().mean().item(), (p[:, 0] > 0).sum().item()


model = Model()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.937, nesterov=True, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
ema, gen = ModelEMA(model), torch.Generator().manual_seed(152)
for step in range(90):
    x, obj, cls = images(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
        loss, lobj, lcls = compute_loss(pred, obj, cls)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ema.update(model)
    if step % 15 == 0:
        print(f"step {step} obj {lobj:.4f} cls {lcls:.4f} scale {scaler.get_scale():g}")

last = io.BytesIO()
torch.save({"epoch": 0, "model": model, "ema": ema.ema, "optimizer": optimizer.state_dict()}, last)
last.seek(0)
print("recall, class accuracy, detections of the averaged model", val(ema.ema, torch.Generator().manual_seed(5)))
stripped = torch.load(strip_optimizer(last), weights_only=False)["model"].eval()
print(f"stripped: {next(stripped.parameters()).dtype}")
print("in float32", val(copy.deepcopy(stripped).float(), torch.Generator().manual_seed(5)))
print("in half   ", val(stripped, torch.Generator().manual_seed(5), half=True))
