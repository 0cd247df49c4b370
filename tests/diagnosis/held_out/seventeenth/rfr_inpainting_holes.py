"""Recurrent feature reasoning for inpainting: partial convolutions that fill a hole from its border."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(91)


class PartialConv2d(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_mask_updater = torch.ones(self.out_channels, self.in_channels, *self.kernel_size)
        self.slide_winsize = self.in_channels * self.kernel_size[0] * self.kernel_size[1]

    def forward(self, input, mask):
        with torch.no_grad():
            update_mask = F.conv2d(mask, self.weight_mask_updater.to(mask), None, self.stride, self.padding)
            mask_ratio = self.slide_winsize / (update_mask + 1e-8)  # CAUSE
            update_mask = torch.clamp(update_mask, 0, 1)
            mask_ratio = torch.mul(mask_ratio, update_mask)  # CAUSE
        raw_out = super().forward(torch.mul(input, mask))
        return torch.mul(raw_out, mask_ratio), update_mask


class RFRModule(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU())
        self.dec = nn.Sequential(nn.ConvTranspose2d(2 * c, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c), nn.LeakyReLU(0.2))

    def forward(self, x):
        return self.dec(self.enc(x))


class RFRNet(nn.Module):
    def __init__(self, c=12, recurrences=3):
        super().__init__()
        self.recurrences = recurrences
        self.Pconv1, self.bn1 = PartialConv2d(3, c, 5, 2, 2, bias=False), nn.BatchNorm2d(c)
        self.Pconv21, self.bn2 = PartialConv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c)
        self.rfr = RFRModule(c)
        self.Tconv, self.bn3 = nn.ConvTranspose2d(c, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c)
        self.out = nn.Conv2d(c + 3, 3, 3, 1, 1)

    def forward(self, image, mask):
        x, m = self.Pconv1(image, mask)
        x = F.relu(self.bn1(x))
        features, masks = [x], [m]
        for _ in range(self.recurrences):
            x, m = self.Pconv21(x, m)
            x = self.rfr(F.leaky_relu(self.bn2(x))) * m
            features.append(x)
            masks.append(m)
        x, amp_vec = torch.stack(features, 2), torch.stack(masks, 2)
        x = (x * amp_vec).mean(2) / (amp_vec.mean(2) + 1e-4)
        x = F.leaky_relu(self.bn3(self.Tconv(x)))
        return self.out(torch.cat([image, x], 1))


def pictures(gen, n, hole):
    """Plane waves; the hole is a square of zeros."""
    y, x = torch.meshgrid(torch.linspace(0, 3, 32), torch.linspace(0, 3, 32), indexing="ij")
    k = 4 * torch.rand(n, 3, 2, 1, 1, generator=gen) - 2
    image = torch.sin(k[:, :, 0] * x + k[:, :, 1] * y + 6 * torch.rand(n, 3, 1, 1, generator=gen))
    mask = torch.ones(n, 3, 32, 32)
    for i in range(n):
        r, c = torch.randint(2, 30 - hole, (2,), generator=gen).tolist()
        mask[i, :, r:r + hole, c:c + hole] = 0
    return image, mask


def main(steps=50):
    net = RFRNet()
    watch(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    gen = torch.Generator().manual_seed(92)
    bad = 0
    for step in range(steps):
        hole = int(torch.randint(3, 12, (1,), generator=gen)) if step >= 10 else 3
        image, mask = pictures(gen, 4, hole)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = net(image * mask, mask)
            hole_loss = ((fake - image).abs() * (1 - mask)).sum() / (1 - mask).sum()
            valid_loss = ((fake - image).abs() * mask).sum() / mask.sum()
            loss = 6 * hole_loss.float() + valid_loss.float()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        bad += not torch.isfinite(loss).item()
        if step % 5 == 0 or step == steps - 1:
            print(f"{step:3d} hole {hole:2d} loss {loss.item():.4f} scale {scaler.get_scale():g} not finite {bad}")


main()
