"""Salient object detection with context attention on a small feature pyramid, mixed precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(384)
SIZE, CHANNELS = 32, 16


def conv(cin, cout, k, relu=False):
    layers = [nn.Conv2d(cin, cout, k, padding=k // 2, bias=False), nn.BatchNorm2d(cout)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(nn.Conv2d(cin, cout, k, padding=k // 2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.merge = nn.Conv2d(3, CHANNELS, 4, stride=2, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 2, stride=2)
        for m, gain in ((self.patch, 58.0), (self.merge, 1.4)):  # stands for the pretrained backbone
            nn.init.xavier_normal_(m.weight, gain)

    def forward(self, x):
        f1 = F.gelu(self.patch(x))
        return f1, F.gelu(self.merge(f1))


class SICA(nn.Module):
    """Scale-invariant context attention: foreground, background and uncertain area attend to every position."""

    def __init__(self, in_channel, channel):
        super().__init__()
        self.channel = channel
        self.conv_query = nn.Sequential(nn.Conv2d(in_channel, channel, 1), nn.ReLU(), nn.Conv2d(channel, channel, 1))
        self.conv_key = nn.Sequential(nn.Conv2d(in_channel, channel, 1), nn.ReLU(), nn.Conv2d(channel, channel, 1))
        self.conv_value = nn.Sequential(nn.Conv2d(in_channel, channel, 1), nn.ReLU(), nn.Conv2d(channel, channel, 1))
        self.conv_out1 = conv(channel, channel, 1, relu=True)
        self.conv_out2 = conv(in_channel + channel, channel, 3, relu=True)
        self.conv_out4 = conv(channel, 1, 1)
        self.threshold = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x, smap):
        b, c, h, w = x.shape
        smap = torch.sigmoid(F.interpolate(smap, size=(h, w), mode="bilinear", align_corners=False))
        p = smap - self.threshold
        fg, bg, cg = torch.clip(p, 0, 1), torch.clip(-p, 0, 1), self.threshold - torch.abs(p)
        prob = torch.cat([fg, bg, cg], dim=1).view(b, 3, h * w)
        f = x.flatten(2).transpose(1, 2)

        context = torch.bmm(prob, f).permute(0, 2, 1).unsqueeze(3)  # b, c, 3, 1
        query = self.conv_query(x).view(b, self.channel, -1).permute(0, 2, 1)
        key = self.conv_key(context).view(b, self.channel, -1)
        value = self.conv_value(context).view(b, self.channel, -1).permute(0, 2, 1)

        sim = torch.bmm(query, key)  # CAUSE
        sim = (self.channel ** -.5) * sim
        sim = F.softmax(sim, dim=-1)

        context = torch.bmm(sim, value).permute(0, 2, 1).contiguous().view(b, -1, h, w)
        x = self.conv_out2(torch.cat([x, self.conv_out1(context)], dim=1))
        return x, self.conv_out4(x)


class InSPyReNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), nn.Conv2d(CHANNELS, 1, 3, padding=1)
        self.attention2, self.attention1 = SICA(CHANNELS, CHANNELS), SICA(CHANNELS, CHANNELS)

    def forward(self, x):
        f1, f2 = self.encoder(x)
        d3 = self.decoder(f2)
        f2, d2 = self.attention2(f2, d3)
        _, d1 = self.attention1(f1, d2)
        return [F.interpolate(d, size=x.shape[-2:], mode="bilinear", align_corners=False) for d in (d3, d2, d1)]


def structure_loss(pred, mask):
    pred = pred.float()
    bce = F.binary_cross_entropy_with_logits(pred, mask)
    p = torch.sigmoid(pred)
    inter, union = (p * mask).sum((2, 3)), (p + mask).sum((2, 3))
    return bce + (1 - (inter + 1) / (union - inter + 1)).mean()


def scenes(gen, n=4):
    """Noisy scenery with one disc; some photographs have a bright, large object in front."""
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    img, mask = 0.3 * torch.randn(n, 3, SIZE, SIZE, generator=gen), torch.zeros(n, 1, SIZE, SIZE)
    for i in range(n):
        cy, cx = torch.randint(8, 24, (2,), generator=gen).tolist()
        r = int(torch.randint(4, 13, (1,), generator=gen))
        mask[i, 0] = ((yy - cy) ** 2 + (xx - cx) ** 2 < r * r).float()
        img[i] += mask[i] * (0.6 + 0.4 * torch.rand(3, 1, 1, generator=gen)) * (1 + r / 6)
    return img, mask


def main(iters=70):
    model = InSPyReNet()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, iters * 2, power=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    gen = torch.Generator().manual_seed(5)
    for it in range(iters):
        img, mask = scenes(gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            preds = model(img)
            loss = sum(structure_loss(p, mask) for p in preds)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if it % 5 == 0:
            iou = ((preds[-1] > 0) & (mask > 0)).sum() / ((preds[-1] > 0) | (mask > 0)).sum()
            print(f"iter {it} loss {loss.item():.4f} iou {iou.item():.3f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
