"""Score distillation of a small texture field; the guidance gradient is injected with a custom Function."""
import torch
import torch.nn as nn
from torch.amp import custom_bwd, custom_fwd

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(5)


class SpecifyGradient(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, input_tensor, gt_grad):
        ctx.save_for_backward(gt_grad)
        return torch.ones([1], dtype=torch.float32)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        (gt_grad,) = ctx.saved_tensors
        return gt_grad, None  # CAUSE


class TextureField(nn.Module):
    def __init__(self, res=12, bands=4):
        super().__init__()
        axis = torch.linspace(-1, 1, res)
        xy = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        phases = xy[:, :, None] * (2.0 ** torch.arange(bands)) * torch.pi / 2
        self.register_buffer("features", torch.cat([phases.sin(), phases.cos()], -1).flatten(1))
        self.mlp = nn.Sequential(nn.Linear(4 * bands, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3))
        self.res = res

    def forward(self):
        rgb = torch.sigmoid(self.mlp(self.features))
        return rgb.T.reshape(1, 3, self.res, self.res)


class ToyGuidance(nn.Module):
    """Stands in for a diffusion prior: its noise prediction pulls images to a checkerboard."""

    def __init__(self, res=12):
        super().__init__()
        board = (torch.arange(res)[:, None] // 3 + torch.arange(res) // 3) % 2
        self.register_buffer("mode", torch.stack([board, 1 - board, board * 0.5]).float()[None])
        self.alphas = torch.linspace(0.99, 0.4, 50)

    def train_step(self, image, gen):
        t = torch.randint(5, 45, (1,), generator=gen)
        alpha = self.alphas[t].view(1, 1, 1, 1)
        noise = torch.randn(image.shape, generator=gen)
        with torch.no_grad():
            noisy = alpha.sqrt() * image.float() + (1 - alpha).sqrt() * noise
            predicted = (noisy - alpha.sqrt() * self.mode) / (1 - alpha).sqrt()
            grad = (1 - alpha) * (predicted - noise)
            grad = torch.nan_to_num(grad) / image.numel()
        return SpecifyGradient.apply(image, grad)


def total_variation(image):
    return (image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean())


field, guidance = TextureField(), ToyGuidance()
watch(field, guidance)
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3, eps=1e-15)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
gen = torch.Generator().manual_seed(77)

for step in range(100):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        image = field()
        loss_guidance = guidance.train_step(image, gen)
        loss = loss_guidance.sum() + 0.01 * total_variation(image.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0 or step == 99:
        error = (image.detach().float() - guidance.mode).abs().mean()
        print(f"{step:3d} loss {loss.item():.4f} contrast {image.std().item():.4f} distance {error.item():.4f}")
