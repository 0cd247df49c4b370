"""Optical flow with a small recurrent RAFT, fp16 autocast, one-cycle learning rate, sequence loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(104)
SIZE, FNET, HDIM, RADIUS, REFINE, BATCH, NUM_STEPS, MAX_FLOW, GAMMA = 12, 12, 16, 2, 3, 6, 70, 400, 0.8


class BasicEncoder(nn.Module):
    def __init__(self, output_dim, norm=True):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1), nn.InstanceNorm2d(12) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(12, output_dim, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.norm1(self.conv1(x))))


class ConvGRU(nn.Module):
    def __init__(self, hidden, inputs):
        super().__init__()
        self.convz, self.convr, self.convq = (nn.Conv2d(hidden + inputs, hidden, 3, padding=1) for _ in range(3))

    def forward(self, h, x):
        hx = torch.cat((h, x), dim=1)
        z, r = torch.sigmoid(self.convz(hx)), torch.sigmoid(self.convr(hx))
        q = torch.tanh(self.convq(torch.cat((r * h, x), dim=1)))
        return (1 - z) * h + z * q


class RAFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.fnet, self.cnet = BasicEncoder(FNET), BasicEncoder(HDIM, norm=False)
        window = (2 * RADIUS + 1) ** 2
        self.gru, self.flow_head = ConvGRU(HDIM, window + 2), nn.Conv2d(HDIM, 2, 3, padding=1)

    def lookup(self, fmap1, fmap2):
        padded = F.pad(fmap2, (RADIUS,) * 4)
        s = 2 * RADIUS + 1
        corr = [(fmap1 * padded[:, :, dy:dy + SIZE, dx:dx + SIZE]).sum(1) for dy in range(s) for dx in range(s)]
        return torch.stack(corr, dim=1) / FNET ** 0.5

    def forward(self, image1, image2, iters=REFINE):
        with torch.autocast("cpu", dtype=torch.float16):
            fmap1, fmap2 = self.fnet(image1), self.fnet(image2)
        corr = self.lookup(fmap1.float(), fmap2.float())
        with torch.autocast("cpu", dtype=torch.float16):
            net = torch.tanh(self.cnet(image1))
        flow, predictions = torch.zeros(len(image1), 2, SIZE, SIZE), []
        for _ in range(iters):
            flow = flow.detach()
            with torch.autocast("cpu", dtype=torch.float16):
                net = self.gru(net, torch.cat((corr, flow), dim=1))
                delta_flow = self.flow_head(net)
            flow = flow + delta_flow.float()
            predictions.append(flow)
        return predictions


def sequence_loss(flow_preds, flow_gt, valid):
    mag = flow_gt.pow(2).sum(1).sqrt()
    valid = (valid >= 0.5) & (mag < MAX_FLOW)
    loss = 0.0
    for i, pred in enumerate(flow_preds):
        weight = GAMMA ** (len(flow_preds) - i - 1)
        loss = loss + weight * (valid[:, None] * (pred - flow_gt).abs()).mean()
    with torch.no_grad():
        epe = (flow_preds[-1] - flow_gt).pow(2).sum(1).sqrt()[valid].mean().item()
    return loss, epe


def flying_squares(gen, n=BATCH):
    """Smooth noise and the same noise moved by up to two pixels; pixels that come from outside are not valid."""
    flow = torch.randint(-RADIUS, RADIUS + 1, (n, 2), generator=gen)
    canvas = F.avg_pool2d(torch.randn(n, 1, SIZE + 10, SIZE + 10, generator=gen), 2, stride=1) * 2
    image1 = canvas[:, :, 4:4 + SIZE, 4:4 + SIZE]
    image2 = torch.stack([canvas[i, :, 4 - int(dy):4 - int(dy) + SIZE, 4 - int(dx):4 - int(dx) + SIZE] for i, (dx, dy) in enumerate(flow)])
    gt = flow.float()[:, :, None, None].expand(n, 2, SIZE, SIZE)
    grid = torch.arange(SIZE)
    inside = lambda d: ((grid + d[:, None]) >= 0) & ((grid + d[:, None]) < SIZE)
    valid = inside(flow[:, 1])[:, :, None] & inside(flow[:, 0])[:, None, :]
    return image1, image2, gt, valid.float()


def fetch_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, NUM_STEPS + 100, pct_start=0.05, cycle_momentum=False,
                                                    anneal_strategy="linear")
    return optimizer, scheduler


model = RAFT()
watch(model)
optimizer, scheduler = fetch_optimizer(model)
scaler = torch.amp.GradScaler("cpu")
gen = torch.Generator().manual_seed(1234)
for total_steps in range(1, NUM_STEPS + 1):
    optimizer.zero_grad()
    image1, image2, flow, valid = flying_squares(gen)
    loss, epe = sequence_loss(model(image1, image2), flow, valid)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scheduler.step()
    scaler.update()
    if total_steps % 7 == 0:
        print(f"[{total_steps:6d}, {scheduler.get_last_lr()[0]:10.7f}] loss {loss.item():.4f} epe {epe:.4f} scale {scaler.get_scale():g}")
MODULES = (model,)
