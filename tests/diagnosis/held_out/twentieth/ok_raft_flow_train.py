"""Optical flow with iterative refinement on moving textures: one-cycle schedule, clipped gradients, mixed precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1234)
MAX_FLOW, SUM_FREQ, SIDE = 400, 10, 12


class args:
    lr, num_steps, wdecay, epsilon, clip, gamma, iters, batch_size, mixed_precision = 4e-3, 70, 1e-5, 1e-8, 1.0, 0.8, 3, 6, True


class Encoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, d, 3, padding=1), nn.Conv2d(d, d, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x)))


class ConvGRU(nn.Module):
    def __init__(self, hidden, inputs):
        super().__init__()
        self.gates, self.cand = nn.Conv2d(hidden + inputs, 2 * hidden, 1), nn.Conv2d(hidden + inputs, hidden, 1)

    def forward(self, h, x):
        z, r = torch.sigmoid(self.gates(torch.cat((h, x), 1))).chunk(2, 1)
        return (1 - z) * h + z * torch.tanh(self.cand(torch.cat((r * h, x), 1)))


class RAFT(nn.Module):
    """All-pairs correlation in a window of two pixels, looked up once, and a recurrent update of the flow."""

    def __init__(self, d=16, radius=2):
        super().__init__()
        self.fnet, self.cnet, self.radius = Encoder(d), Encoder(d), radius
        window = (2 * radius + 1) ** 2
        self.motion, self.gru = nn.Conv2d(window + 2, 24, 1), ConvGRU(d, 24)
        self.flow_head = nn.Conv2d(d, 2, 3, padding=1)

    def corr(self, f1, f2):
        r = self.radius
        padded = F.pad(f2, (r, r, r, r))
        shifts = [padded[:, :, i:i + SIDE, j:j + SIDE] for i in range(2 * r + 1) for j in range(2 * r + 1)]
        return torch.stack([(f1 * s).sum(1) for s in shifts], 1) / f1.size(1) ** 0.5

    def forward(self, image1, image2, iters):
        with torch.autocast("cpu", dtype=torch.float16, enabled=args.mixed_precision):
            fmap1, fmap2, net = self.fnet(image1), self.fnet(image2), torch.tanh(self.cnet(image1))
        corr = self.corr(fmap1.float(), fmap2.float())
        flow, predictions = torch.zeros(image1.size(0), 2, SIDE, SIDE), []
        for _ in range(iters):
            flow = flow.detach()
            with torch.autocast("cpu", dtype=torch.float16, enabled=args.mixed_precision):
                net = self.gru(net, F.relu(self.motion(torch.cat((corr, flow), 1))))
                delta = self.flow_head(net)
            flow = flow + delta.float()
            predictions.append(8 * flow)
        return predictions


def sequence_loss(flow_preds, flow_gt, gamma):
    loss = 0.0
    valid = flow_gt.norm(dim=1) < MAX_FLOW
    for i, pred in enumerate(flow_preds):
        loss = loss + gamma ** (len(flow_preds) - i - 1) * (valid[:, None] * (pred - flow_gt).abs()).mean()
    epe = (flow_preds[-1] - flow_gt).pow(2).sum(1).sqrt()[valid]
    return loss, {"epe": epe.mean().item(), "3px": (epe < 3).float().mean().item()}


def fetch(gen, n):
    """A texture and the same moved by whole cells; the flow is given in pixels of the full picture (eight a cell)."""
    base = F.avg_pool2d(torch.randn(n, 1, SIDE + 2, SIDE + 2, generator=gen), 3, stride=1) * 3
    shift = torch.randint(-2, 3, (n, 2), generator=gen)
    moved = torch.stack([b.roll(tuple(s), (1, 2)) for b, s in zip(base, shift.tolist())])
    flow = 8 * shift.flip(1).float()[:, :, None, None].expand(n, 2, SIDE, SIDE)
    return base, moved + 0.05 * torch.randn(moved.shape, generator=gen), flow


class Logger:
    def __init__(self, scheduler):
        self.scheduler, self.total, self.running = scheduler, 0, {}

    def push(self, metrics):
        self.total += 1
        for k, v in metrics.items():
            self.running[k] = self.running.get(k, 0.0) + v
        if self.total % SUM_FREQ == 0:
            body = ", ".join(f"{k} {v / SUM_FREQ:.4f}" for k, v in sorted(self.running.items()))
            print(f"[{self.total:6d}, {self.scheduler.get_last_lr()[0]:.7f}] {body}")
            self.running = {}


model = RAFT()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=args.epsilon)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.num_steps + 10, pct_start=0.1, cycle_momentum=False,
                                                anneal_strategy="linear")
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, enabled=args.mixed_precision)
logger, gen = Logger(scheduler), torch.Generator().manual_seed(6)

for total_steps in range(args.num_steps):
    optimizer.zero_grad()
    image1, image2, flow = fetch(gen, args.batch_size)
    flow_predictions = model(image1, image2, iters=args.iters)
    loss, metrics = sequence_loss(flow_predictions, flow, args.gamma)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scheduler.step()
    scaler.update()
    logger.push({**metrics, "loss": loss.item()})

MODULES = (model,)
