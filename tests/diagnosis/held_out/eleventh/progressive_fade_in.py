"""Second stage of a progressively grown autoencoder: half-precision weights, float32 master copies,
a loss scaler by hand, and a fade-in of the new block that is driven by the number of images seen."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)
DTYPE = torch.float16


class GrowingAutoencoder(nn.Module):
    def __init__(self, width=8, stage_start=32_400, fade_images=900):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 8, 3, 2, 1))
        self.stem = nn.Sequential(nn.Conv2d(8, width, 3, 1, 1), nn.LeakyReLU(0.2))
        self.to_gray_low = nn.Conv2d(width, 1, 1)
        self.block_high = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.LeakyReLU(0.2),
                                        nn.Conv2d(width, width, 3, 1, 1), nn.LeakyReLU(0.2))
        self.to_gray_high = nn.Conv2d(width, 1, 1)
        self.stage_start, self.fade_images = stage_start, fade_images
        self.register_buffer("images_seen", torch.tensor(float(stage_start)))

    @property
    def alpha(self):
        return ((self.images_seen.float() - self.stage_start) / self.fade_images).clamp(0, 1)

    def forward(self, image):
        if self.training:
            self.images_seen += image.size(0)  # CAUSE
        h = F.interpolate(self.stem(self.encode(image)), scale_factor=2.0)
        low = F.interpolate(self.to_gray_low(h), scale_factor=2.0)
        high = self.to_gray_high(self.block_high(F.interpolate(h, scale_factor=2.0)))
        alpha = self.alpha.to(high.dtype)
        return (1 - alpha) * low + alpha * high


class MasterOptimizer:
    """Adam on float32 copies; the scale doubles after `window` clean steps and halves on overflow."""

    def __init__(self, model, lr, scale=2.0 ** 10, window=40):
        self.params = list(model.parameters())
        self.master = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.adam = torch.optim.Adam(self.master, lr=lr)
        self.scale, self.window, self.clean = scale, window, 0

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self):
        ok = all(bool(p.grad.isfinite().all()) for p in self.params)
        if ok:
            for m, p in zip(self.master, self.params):
                m.grad = p.grad.float() / self.scale
            self.adam.step()
            with torch.no_grad():
                for m, p in zip(self.master, self.params):
                    p.copy_(m)
            self.clean += 1
            if self.clean % self.window == 0:
                self.scale *= 2
        else:
            self.scale, self.clean = self.scale / 2, 0
        for p in self.params:
            p.grad = None
        return ok


def images(n, generator):
    """Random stripes and blobs, 16 x 16."""
    axis = torch.linspace(-1, 1, 16)
    freq, phase, angle = (torch.rand(n, 1, 1, generator=generator) for _ in range(3))
    u = axis[None, :, None] * torch.cos(angle * 3.1) + axis[None, None, :] * torch.sin(angle * 3.1)
    return torch.tanh(4 * torch.sin((2 + 6 * freq) * u + 6.3 * phase))[:, None]


model = GrowingAutoencoder().to(DTYPE)
watch(model)
optimizer = MasterOptimizer(model, lr=2e-3)
generator = torch.Generator().manual_seed(4)
batch_size = 16

for iteration in range(60):
    x = images(batch_size, generator).to(DTYPE)
    loss = F.l1_loss(model(x).float(), x.float())
    optimizer.backward(loss)
    optimizer.step()
    if iteration % 10 == 0 or iteration == 59:
        print(f"it {iteration:3d} l1 {loss.item():.4f} alpha {model.alpha.item():.3f} scale {optimizer.scale:g}")
