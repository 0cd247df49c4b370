"""Volume segmentation: trained under autocast, predicted window by window in half precision with Gaussian weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(477)
PATCH, CLASSES = 8, 3


class UNet3D(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv3d(1, w, 3, padding=1), nn.InstanceNorm3d(w, affine=True), nn.LeakyReLU(0.01))
        self.enc2 = nn.Sequential(nn.Conv3d(w, 2 * w, 3, stride=2, padding=1), nn.InstanceNorm3d(2 * w, affine=True), nn.LeakyReLU(0.01))
        self.up, self.seg = nn.ConvTranspose3d(2 * w, w, 2, stride=2), nn.Conv3d(2 * w, CLASSES, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        return self.seg(torch.cat((e1, self.up(self.enc2(e1))), dim=1))


def volumes(gen, n, size):
    """Scans with a large organ (1) and a small bright lesion (2), in units of standard deviations."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(size).float()] * 3, indexing="ij"))
    img, lab = torch.randn(n, 1, size, size, size, generator=gen) * 0.6, torch.zeros(n, size, size, size, dtype=torch.long)
    for i in range(n):
        c = torch.rand(3, 1, 1, 1, generator=gen) * size * 0.4 + size * 0.3
        organ = ((grid - c) ** 2).sum(0) < (0.35 * size) ** 2
        lesion = ((grid - c - 1) ** 2).sum(0) < (0.2 * size) ** 2
        lab[i][organ], lab[i][lesion] = 1, 2
        img[i, 0] += organ * 1.2 + lesion * 2.5
    return img, lab


def soft_dice(logits, lab):
    p = logits.float().softmax(1)
    onehot = F.one_hot(lab, CLASSES).permute(0, 4, 1, 2, 3).float()
    dims = (0, 2, 3, 4)
    dice = (2 * (p * onehot).sum(dims) + 1e-5) / (p.sum(dims) + onehot.sum(dims) + 1e-5)
    return 1 - dice[1:].mean()


def gaussian_map():
    axis = torch.exp(-0.5 * ((torch.arange(PATCH) - (PATCH - 1) / 2) / (PATCH / 8)) ** 2)
    g = axis[:, None, None] * axis[None, :, None] * axis[None, None]
    g = g / g.max()
    return g.clamp(min=g[g > 0].min())


@torch.no_grad()
def predict_sliding_window(net, img, dtype):
    """Half precision: network, Gaussian weights and the sums of the windows are all kept in dtype."""
    net = net.to(dtype).eval()
    size, step = img.shape[-1], PATCH // 2
    weights = gaussian_map().clamp(min=1e-3).to(dtype)
    result, norm = torch.zeros(CLASSES, size, size, size, dtype=dtype), torch.zeros(size, size, size, dtype=dtype)
    for a in range(0, size - PATCH + 1, step):
        for b in range(0, size - PATCH + 1, step):
            for c in range(0, size - PATCH + 1, step):
                at = (slice(a, a + PATCH), slice(b, b + PATCH), slice(c, c + PATCH))
                result[(slice(None), *at)] += net(img[(slice(None), slice(None), *at)].to(dtype))[0] * weights
                norm[at] += weights
    net.to(torch.float32)
    return (result / norm).argmax(0)


def dice_per_class(pred, lab):
    return [round(((2 * ((pred == c) & (lab == c)).sum()) / ((pred == c).sum() + (lab == c).sum()).clamp(min=1)).item(), 4)
            for c in range(1, CLASSES)]


net = UNet3D()
watch(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.95, nesterov=True, weight_decay=3e-5)
scaler = torch.amp.GradScaler("cpu")
gen = torch.Generator().manual_seed(478)
for step in range(80):
    img, lab = volumes(gen, 2, 16)
    a, b, c = torch.randint(2, 7, (3,), generator=gen).tolist()
    img, lab = (t[..., a:a + PATCH, b:b + PATCH, c:c + PATCH] for t in (img, lab))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(img)
        loss = F.cross_entropy(out.float(), lab) + soft_dice(out, lab)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 12)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")

test_img, test_lab = volumes(torch.Generator().manual_seed(479), 1, 16)
for dtype in (torch.float32, torch.half):
    pred = predict_sliding_window(net, test_img, dtype)
    print(f"{dtype}: dice {dice_per_class(pred, test_lab[0])}")
