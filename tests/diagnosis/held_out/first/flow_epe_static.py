"""Two-frame optical flow, small encoder with a correlation volume and a zero-initialised flow head."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def correlate(f1, f2, radius=2):
    b, c, h, w = f1.shape
    pad = F.pad(f2, [radius] * 4)
    out = []
    for dy in range(2 * radius + 1):
        for dx in range(2 * radius + 1):
            out.append((f1 * pad[:, :, dy:dy + h, dx:dx + w]).mean(1))
    return torch.stack(out, 1)


class FlowNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.feat = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(c, c, 3, padding=1))
        self.refine = nn.Sequential(nn.Conv2d(25 + c, 32, 3, padding=1), nn.LeakyReLU(0.1))
        self.flow = nn.Conv2d(32, 2, 3, padding=1)
        nn.init.zeros_(self.flow.weight)
        nn.init.zeros_(self.flow.bias)

    def forward(self, a, b):
        fa, fb = self.feat(a), self.feat(b)
        changed = F.max_pool2d((a - b).abs(), 3, 1, 1) > 0.01
        return self.flow(self.refine(torch.cat([correlate(fa, fb), fa], 1))) * changed


def epe(flow, gt, valid):
    d = (flow.float() - gt).pow(2).sum(1)
    err = d.sqrt()  # CAUSE
    return (err * valid).sum() / valid.sum().clamp(min=1)


def warp_pair(gen, b=4, size=20):
    """the camera moves in most clips; a clip taken from a tripod has flow exactly 0"""
    tex = torch.randn(b, 1, size + 8, size + 8, generator=gen)
    tex = F.avg_pool2d(tex, 3, 1, 1) * 3
    gt = torch.zeros(b, 2, size, size)
    a, c = torch.empty(b, 1, size, size), torch.empty(b, 1, size, size)
    for i in range(b):
        dy, dx = torch.randint(1, 3, (2,), generator=gen).tolist()
        if torch.rand(1, generator=gen) < 0.015:
            dy = dx = 0
        a[i] = tex[i, :, 4:4 + size, 4:4 + size]
        c[i] = tex[i, :, 4 - dy:4 - dy + size, 4 - dx:4 - dx + size]
        gt[i, 0], gt[i, 1] = dx, dy
    valid = (torch.rand(b, size, size, generator=gen) > 0.1).float()
    return a, c, gt, valid


class OneCycleRun:
    def __init__(self, net, iters):
        self.net, self.iters = net, iters
        self.opt = torch.optim.AdamW(net.parameters(), lr=4e-4, eps=1e-8, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 2e-3, total_steps=iters + 10, pct_start=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def iterate(self, batch):
        a, c, gt, valid = batch
        self.opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            pred = self.net(a, c)
        moving = gt.abs().amax(dim=(1, 2, 3)) > 0
        loss = epe(pred, gt, valid * moving[:, None, None])
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.sched.step()
        self.scaler.update()
        return loss.item()


torch.set_num_threads(1)
torch.manual_seed(0)
model = FlowNet()
MODULES = [model]
run = OneCycleRun(model, 50)
watch(*MODULES)
stream = torch.Generator().manual_seed(19)
for it in range(run.iters):
    value = run.iterate(warp_pair(stream))
    if it % 10 == 9:
        print(f"it {it + 1} epe {value:.4f} scale {run.scaler.get_scale():g}")
