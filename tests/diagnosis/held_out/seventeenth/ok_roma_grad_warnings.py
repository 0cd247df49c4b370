"""Dense matching of two views; the step function warns when a parameter's gradient is not finite."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(191)


class Encoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, d, 3, 2, 1), nn.ReLU(), nn.Conv2d(d, d, 3, padding=1))

    def forward(self, x):
        return F.normalize(self.net(x).float(), dim=1, eps=1e-6)


class RegressionMatcher(nn.Module):
    """Coarse match by correlation, then a small convolution refines the flow and says how certain it is."""

    def __init__(self, d=16, side=12):
        super().__init__()
        self.encoder, self.side = Encoder(d), side
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.refiner = nn.Sequential(nn.Conv2d(d + 2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, im_a, im_b):
        fa, fb = self.encoder(im_a), self.encoder(im_b)
        n, c, h, w = fa.shape
        corr = torch.einsum("nchw,ncij->nhwij", fa, fb).reshape(n, h * w, h * w)
        prob = (corr.float() * self.temperature.exp()).softmax(-1)
        axis = torch.linspace(-1, 1, h)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).flip(-1).reshape(-1, 2)
        coarse = (prob @ grid).view(n, h, w, 2).permute(0, 3, 1, 2)
        delta = self.refiner(torch.cat([fa, coarse], 1))
        return coarse + delta[:, :2].float() / h, delta[:, 2:].float()


def view_pairs(gen, n=4, side=24):
    """Smooth noise; the second view is shifted by an even number of pixels, the rest of it is new."""
    scene = F.interpolate(torch.randn(n, 1, 20, 20, generator=gen), size=(2 * side, 2 * side), mode="bilinear")
    dy, dx = (2 * torch.randint(-3, 4, (2, n), generator=gen)).tolist()
    a = scene[:, :, 12:12 + side, 12:12 + side]
    b = torch.stack([scene[i, :, 12 + dy[i]:12 + dy[i] + side, 12 + dx[i]:12 + dx[i] + side] for i in range(n)])
    axis = torch.linspace(-1, 1, side // 2)
    step = 2 / (side // 2 - 1)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    flow = torch.stack([torch.stack([x - dx[i] / 2 * step, y - dy[i] / 2 * step]) for i in range(n)])
    valid = (flow.abs() <= 1).all(1, keepdim=True).float()
    return a + 0.05 * torch.randn(a.shape, generator=gen), b, flow, valid


def robust_loss(flow, certainty, target, valid):
    error = (flow - target).pow(2).sum(1, keepdim=True)
    regression = ((error + 1e-3).sqrt() * valid).sum() / valid.sum()
    return regression + 0.1 * F.binary_cross_entropy_with_logits(certainty, valid)


def train_step(batch, model, optimizer, grad_scaler, grad_clip_norm=1.0):
    optimizer.zero_grad()
    im_a, im_b, target, valid = batch
    with torch.autocast("cpu", dtype=torch.float16):
        flow, certainty = model(im_a, im_b)
    loss = robust_loss(flow, certainty, target, valid)
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        if not p.grad.isfinite().all():
            print(f"WARNING: nan or inf in the gradient of {name}")
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip_norm)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    return loss.item(), ((flow - target).pow(2).sum(1).sqrt() * valid[:, 0]).sum().item() / valid.sum().item()


model = RegressionMatcher()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=10)
gen = torch.Generator().manual_seed(192)
for n in range(60):
    loss, epe = train_step(view_pairs(gen), model, optimizer, grad_scaler)
    if n % 10 == 0 or n == 59:
        print(f"step {n} loss {loss:.4f} end point error {epe:.4f} scale {grad_scaler.get_scale():g}")
