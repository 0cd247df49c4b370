"""Linear probe on the features of a frozen ConvNeXt that runs in half precision, small texture images."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(80)
CLASSES, SIZE, BATCH, ITERS = 6, 16, 32, 90
DIMS, DEPTHS = (12, 24, 32), (1, 1, 1)


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)  # CAUSE
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, dim, layer_scale_init_value=0.1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim)
        self.norm = LayerNorm(dim)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(layer_scale_init_value * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + (self.gamma * x).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.downsample_layers = nn.ModuleList([nn.Sequential(
            nn.Conv2d(3, DIMS[0], kernel_size=2, stride=2), LayerNorm(DIMS[0], data_format="channels_first"))])
        for i in range(2):
            self.downsample_layers.append(nn.Sequential(
                LayerNorm(DIMS[i], data_format="channels_first"), nn.Conv2d(DIMS[i], DIMS[i + 1], kernel_size=2, stride=2)))
        self.stages = nn.ModuleList(nn.Sequential(*[Block(d) for _ in range(n)]) for d, n in zip(DIMS, DEPTHS))
        self.norm = LayerNorm(DIMS[-1])

    def forward_features(self, x):
        for down, stage in zip(self.downsample_layers, self.stages):
            x = stage(down(x))
        return self.norm(x.mean([-2, -1]))

def load_backbone(model, seed=22):
    """Weights as they come out of a long pre-training: one channel of the residual stream carries a large constant."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        channel = int(torch.randint(DIMS[1], (1,), generator=gen))
        block, norm = model.stages[1][-1], model.downsample_layers[2][0]
        block.gamma[channel], block.pwconv2.bias[channel] = 4.0, 86.0
        norm.weight.mul_(60.0)
        norm.weight[channel] = 0.05
    return model


def textures(gen, n=BATCH):
    """Gratings of six orientations and colours with noise."""
    palette = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).float()
    label = torch.randint(0, CLASSES, (n,), generator=gen)
    angle = label * torch.pi / CLASSES
    phase = 2 * torch.pi * torch.rand(n, generator=gen)
    grid = torch.arange(SIZE).float()
    wave = angle.cos()[:, None, None] * grid[None, :, None] + angle.sin()[:, None, None] * grid[None, None, :]
    image = torch.sin(1.3 * wave + phase[:, None, None])[:, None] * palette[label][:, :, None, None]
    return image + 0.3 * torch.randn(image.shape, generator=gen), label


class LinearProbe(nn.Module):
    """Frozen backbone in half precision, trained classifier in float32."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False).half()
        self.bn, self.head = nn.BatchNorm1d(DIMS[-1], affine=False), nn.Linear(DIMS[-1], CLASSES)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone.forward_features(x.half())
        return self.head(self.bn(features.float()))


def train_one_epoch(model, optimizer, gen, iters=ITERS):
    model.bn.train()
    for it in range(iters):
        samples, targets = textures(gen)
        output = model(samples)
        loss = F.cross_entropy(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (it + 1) % 10 == 0:
            acc1 = (output.argmax(1) == targets).float().mean().item()
            print(f"[{it + 1:3d}/{iters}] loss: {loss.item():.4f} acc1: {100 * acc1:.1f} spread: {output.float().std(0).mean():.5f}")


model = LinearProbe(load_backbone(ConvNeXt()))
watch(model)
optimizer = torch.optim.AdamW(model.head.parameters(), lr=3e-2, weight_decay=0.01)
train_one_epoch(model, optimizer, torch.Generator().manual_seed(1))
MODULES = (model,)
