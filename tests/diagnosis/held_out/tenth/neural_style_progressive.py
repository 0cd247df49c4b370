"""Feed-forward stylisation of textures; the crop size doubles half-way through training."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11)
gen = torch.Generator().manual_seed(5)


class ConvBlock(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1), nn.InstanceNorm2d(cout, affine=True), nn.ReLU())


class Stylizer(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(ConvBlock(3, width), ConvBlock(width, width))
        self.to_rgb = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        return torch.sigmoid(self.to_rgb(self.body(x)) + x)


class LossNetwork(nn.Module):
    """Fixed descriptor network on 0..255 images, returns two taps."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.requires_grad_(False)
        self.register_buffer("mean", torch.tensor([123.7, 116.3, 103.5]).view(1, 3, 1, 1))

    def forward(self, img):
        x = img * 255.0 - self.mean
        a = F.relu(self.conv1(x / 5.8))
        b = F.relu(self.conv2(a))
        return a, b


def gram_matrix(feat):
    n, c, h, w = feat.shape
    flat = feat.reshape(n, c, h * w)
    g = torch.bmm(flat, flat.transpose(1, 2))  # CAUSE
    return g / (c * h * w)


def crops(size, n=4):
    base = torch.rand(n, 3, size // 4, size // 4, generator=gen)
    return F.interpolate(base, size=(size, size), mode="bilinear").clamp(0, 1)


stylizer, descr = Stylizer(), LossNetwork()
MODULES = [stylizer, descr]
optimizer = torch.optim.Adam(stylizer.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=500)
reference = (torch.rand(1, 3, 32, 32, generator=gen) > 0.45).float()


def main(iters=70, switch_at=40):
    watch(*MODULES)
    for it in range(iters):
        size = 16 if it < switch_at else 32
        content = crops(size)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = stylizer(content)
            f_out, f_content = descr(out), descr(content)
            f_style = descr(reference[..., :size, :size])
            content_loss = F.mse_loss(f_out[1], f_content[1])
            style_loss = sum(F.mse_loss(gram_matrix(o), gram_matrix(s).expand(len(o), -1, -1))
                             for o, s in zip(f_out, f_style))
            loss = 0.02 * content_loss + style_loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if it % 10 == 0:
            print(f"{it:3d} {size}px loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
