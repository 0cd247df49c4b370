"""Skeleton action recognition with a graph convolution; half precision with dynamic loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(40)
JOINTS, FRAMES, CLASSES = 11, 12, 6
BONES = [(0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (1, 6), (6, 7), (0, 8), (8, 9), (0, 10)]


def adjacency(scales=3):
    a = torch.eye(JOINTS)
    for i, j in BONES:
        a[i, j] = a[j, i] = 1
    reach, mats = torch.eye(JOINTS), []
    for _ in range(scales):
        mats.append(reach / reach.sum(1, keepdim=True))
        reach = ((reach @ a) > 0).float()
    return torch.stack(mats)


class MultiScaleGCN(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.register_buffer("A", adjacency())
        self.A_res = nn.Parameter(1e-3 * torch.randn(3, JOINTS, JOINTS))
        self.mlp, self.bn = nn.Conv2d(3 * cin, cout, 1), nn.BatchNorm2d(cout)

    def forward(self, x):
        n, c, t, v = x.shape
        support = torch.einsum("svu,nctu->nsctv", self.A + self.A_res, x)
        return F.relu(self.bn(self.mlp(support.reshape(n, 3 * c, t, v))))


class TemporalConv(nn.Module):
    def __init__(self, ch, dilations=(1, 2)):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(ch, ch // 2, (3, 1), padding=(d, 0), dilation=(d, 1)), nn.BatchNorm2d(ch // 2))
            for d in dilations)

    def forward(self, x):
        return F.relu(torch.cat([b(x) for b in self.branches], 1) + x)


class Model(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.data_bn = nn.BatchNorm1d(3 * JOINTS)
        self.gcn1, self.tcn1 = MultiScaleGCN(3, ch), TemporalConv(ch)
        self.gcn2, self.tcn2 = MultiScaleGCN(ch, ch), TemporalConv(ch)
        self.fc = nn.Linear(ch, CLASSES)

    def forward(self, x):
        n, c, t, v = x.shape
        x = self.data_bn(x.permute(0, 3, 1, 2).reshape(n, v * c, t)).view(n, v, c, t).permute(0, 2, 3, 1)
        x = self.tcn2(self.gcn2(self.tcn1(self.gcn1(x))))
        return self.fc(x.mean((2, 3)))


class Feeder:
    def __init__(self, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.pose = torch.randn(3, JOINTS, generator=self.gen)
        self.axis = torch.randn(CLASSES, 3, JOINTS, generator=self.gen)

    def batch(self, n=16):
        y = torch.randint(0, CLASSES, (n,), generator=self.gen)
        t = torch.linspace(0, 6.28, FRAMES)
        swing = torch.sin(t[None] * (1 + y[:, None] % 3) + 6.28 * torch.rand(n, 1, generator=self.gen))
        x = self.pose[None, :, None] + 0.5 * self.axis[y][:, :, None] * swing[:, None, :, None]
        return x + 0.2 * torch.randn(x.shape, generator=self.gen), y


model = Model()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 45])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 22, growth_interval=20)
feeder = Feeder()
for it in range(60):
    data, label = feeder.batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(data)
        loss = F.cross_entropy(output, label)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grad = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()
    if it < 8 or it % 10 == 9:
        acc = (output.argmax(1) == label).float().mean()
        print(f"[{it:2d}] loss {loss.item():.3f} acc {acc:.2f} grad {grad.item():.3f} scale {scale:.0f}")
