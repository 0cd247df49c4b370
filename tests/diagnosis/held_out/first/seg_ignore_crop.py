import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

IGNORE = 255


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(inplace=True))


class TinyUNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.d1, self.d2 = conv_block(3, 16), conv_block(16, 32)
        self.mid = conv_block(32, 32)
        self.u1 = conv_block(32 + 16, 16)
        self.cls = nn.Conv2d(16, classes, 1)
        self.aux = nn.Conv2d(32, classes, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.mid(self.d2(F.max_pool2d(a, 2)))
        up = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.cls(self.u1(torch.cat([up, a], 1))), self.aux(b)


class StreetCrops(torch.utils.data.Dataset):
    """random crops of a large scene; border strips and the ego car are labelled as void"""

    def __init__(self, n, crop=16, seed=0):
        g = torch.Generator().manual_seed(seed)
        H, W = 96, 192
        lab = torch.zeros(H, W, dtype=torch.long)
        lab[32:64] = 1
        lab[40:60, 50:90] = 2
        lab[20:40, 120:150] = 3
        lab[56:, 30:170] = IGNORE
        lab[:, :10] = IGNORE
        pal = torch.tensor([[0.2, 0.4, 0.9], [0.5, 0.5, 0.5], [0.9, 0.2, 0.1], [0.1, 0.8, 0.3]])
        rgb = pal[lab.clamp(max=3)].permute(2, 0, 1) + 0.2 * torch.randn(3, H, W, generator=g)
        self.items = []
        for _ in range(n):
            y = int(torch.randint(0, H - crop, (1,), generator=g))
            x = int(torch.randint(0, W - crop, (1,), generator=g))
            self.items.append((rgb[:, y:y + crop, x:x + crop].clone(), lab[y:y + crop, x:x + crop].clone()))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def criterion(out, aux, target):
    main = F.cross_entropy(out, target, ignore_index=IGNORE)  # CAUSE
    low = target[:, ::2, ::2]
    return main + 0.4 * F.cross_entropy(aux, low, ignore_index=IGNORE)  # CAUSE


torch.set_num_threads(1)
torch.manual_seed(15)
model = TinyUNet()
MODULES = [model]
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
poly = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=90, power=0.9)
loader = torch.utils.data.DataLoader(StreetCrops(180, seed=3), batch_size=2, shuffle=True,
                                     generator=torch.Generator().manual_seed(1))
watch(*MODULES)
for it, (img, lab) in enumerate(loader, 1):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = model(img)
    loss = criterion(out.float(), aux.float(), lab)
    opt.zero_grad()
    loss.backward()
    opt.step()
    poly.step()
    if it % 15 == 0:
        valid = lab != IGNORE
        print(it, "loss", round(loss.item(), 4), "pix acc", (out.argmax(1)[valid] == lab[valid]).float().mean().item())
