"""Camera pose regression from point tracks in bfloat16: an accelerator without gradient scaler, clipping included."""
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2358)
FRAMES, TRACKS = 5, 12


class Accelerator:
    def __init__(self, mixed_precision):
        self.mixed_precision = mixed_precision
        self.scaler = torch.amp.GradScaler("cpu") if mixed_precision == "fp16" else None
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision)

    @contextlib.contextmanager
    def autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    def backward(self, loss):
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def unscale_gradients(self, optimizer):
        if self.mixed_precision == "fp16":
            self.scaler.unscale_(optimizer)

    def clip_grad_norm_(self, optimizer, parameters, max_norm):
        self.unscale_gradients(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer):
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def axis_angle_matrix(v):
    theta = v.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    k = v / theta
    zero = torch.zeros_like(k[..., 0])
    skew = torch.stack((zero, -k[..., 2], k[..., 1], k[..., 2], zero, -k[..., 0], -k[..., 1], k[..., 0], zero), -1)
    skew = skew.view(*v.shape[:-1], 3, 3)
    theta = theta[..., None]
    return torch.eye(3) + torch.sin(theta) * skew + (1 - torch.cos(theta)) * skew @ skew


def sequences(gen, n=16):
    """A camera moves smoothly around a cloud of points; what is seen are the tracks of its projections."""
    points = torch.randn(n, 1, TRACKS, 3, generator=gen)
    velocity = 0.15 * torch.randn(n, 1, 6, generator=gen)
    pose = velocity * torch.arange(FRAMES).view(1, FRAMES, 1)
    rotation = axis_angle_matrix(pose[..., :3])
    seen = (points @ rotation.transpose(-1, -2)) + pose[..., None, 3:] + torch.tensor([0.0, 0.0, 6.0])
    return seen[..., :2] / seen[..., 2:], pose


class PoseTransformer(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed, self.time = nn.Linear(4 * TRACKS, d), nn.Parameter(0.02 * torch.randn(FRAMES, d))
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, 6)

    def forward(self, tracks):
        x = torch.cat((tracks, tracks - tracks[:, :1]), -1).flatten(2)
        x = self.embed(x) + self.time
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return self.head(self.n3(x + self.mlp(self.n2(x))))


def main(steps=100):
    accelerator = Accelerator("bf16")
    model = PoseTransformer()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(2359)
    for step in range(steps):
        tracks, pose = sequences(gen)
        with accelerator.autocast():
            predicted = model(tracks)
            loss = F.smooth_l1_loss(predicted.float(), pose, beta=0.05)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(optimizer, model.parameters(), 1.0)
        accelerator.step(optimizer)
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            error = (predicted.float() - pose).abs()[:, 1:]
            print(f"step {step} loss {loss.item():.5f} grad_norm {norm.item():.5f} "
                  f"rotation {error[..., :3].mean().item():.4f} translation {error[..., 3:].mean().item():.4f}")


main()
