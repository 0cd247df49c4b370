"""FixMatch on small synthetic textures: four labels a class, weak and strong views of unlabelled images, EMA model."""
import contextlib
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(7)
GEN = torch.Generator().manual_seed(70)
SIZE, CLASSES = 12, 4
TEXTURES = F.interpolate(torch.randn(CLASSES, 3, 4, 4, generator=GEN), size=(SIZE, SIZE), mode="bilinear")


class WideBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(cout), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.leaky_relu(self.bn1(x), 0.1)
        return self.short(h) + self.conv2(F.leaky_relu(self.bn2(self.conv1(h)), 0.1))


class WideResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.block1, self.block2 = WideBlock(8, 16, 2), WideBlock(16, 16, 2)
        self.bn, self.fc = nn.BatchNorm2d(16), nn.Linear(16, num_classes)

    def forward(self, x):
        h = F.leaky_relu(self.bn(self.block2(self.block1(self.stem(x)))), 0.1)
        return self.fc(h.mean((2, 3)))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self):
        for n, p in self.model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    @contextlib.contextmanager
    def applied(self):
        backup = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                p.copy_(self.shadow[n])
            yield
            for n, p in self.model.named_parameters():
                p.copy_(backup[n])


def weak(x):
    return torch.roll(x, int(torch.randint(-1, 2, (1,), generator=GEN)), -1) + 0.1 * torch.randn(x.shape, generator=GEN)


def strong(x):
    x = weak(x) + 0.5 * torch.randn(x.shape, generator=GEN)
    r, c = torch.randint(0, SIZE - 4, (2,), generator=GEN).tolist()
    x[..., r:r + 4, c:c + 4] = 0
    return x


def draw(n):
    y = torch.randint(0, CLASSES, (n,), generator=GEN)
    return TEXTURES[y] + 0.4 * torch.randn(n, 3, SIZE, SIZE, generator=GEN), y


def consistency_loss(logits_s, logits_w, p_cutoff):
    pseudo = torch.softmax(logits_w.detach().float(), dim=-1)
    max_probs, max_idx = pseudo.max(dim=-1)
    mask = max_probs.ge(p_cutoff).float()
    return (F.cross_entropy(logits_s.float(), max_idx, reduction="none") * mask).mean(), mask.mean()


class FixMatch:
    def __init__(self, args):
        self.args, self.it = args, 0
        self.model = WideResNet(CLASSES)
        watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.num_train_iter * 16 // 7)
        self.labelled = torch.arange(16) % CLASSES
        self.x_lb = TEXTURES[self.labelled] + 0.4 * torch.randn(16, 3, SIZE, SIZE, generator=GEN)
        self.eval_set = draw(200)

    def train(self):
        args = self.args
        self.ema = EMA(self.model, args.ema_m)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        for _ in range(args.num_train_iter):
            pick = torch.randint(0, 16, (args.batch_size,), generator=GEN)
            x_ulb, _ = draw(args.batch_size * args.uratio)
            inputs = torch.cat((weak(self.x_lb[pick]), weak(x_ulb), strong(x_ulb)))
            with torch.autocast("cpu", dtype=torch.float16):
                logits = self.model(inputs)
                logits_w, logits_s = logits[args.batch_size:].chunk(2)
                sup_loss = F.cross_entropy(logits[:args.batch_size].float(), self.labelled[pick])
                unsup_loss, mask = consistency_loss(logits_s, logits_w, args.p_cutoff)
                total_loss = sup_loss + args.lambda_u * unsup_loss
            scaler.scale(total_loss).backward()
            if args.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)  # CAUSE
            scaler.step(self.optimizer)
            scaler.update()
            self.scheduler.step()
            self.ema.update()
            self.model.zero_grad()
            if self.it % 10 == 0 or self.it == args.num_train_iter - 1:
                print(f"{self.it} iteration, sup_loss {sup_loss.item():.4f} unsup_loss {unsup_loss.item():.4f} "
                      f"mask_ratio {1 - mask.item():.3f} top-1-acc {self.evaluate():.3f} scale {scaler.get_scale():g}")
            self.it += 1

    def evaluate(self):
        x, y = self.eval_set
        self.model.eval()
        with self.ema.applied():
            acc = (self.model(x).argmax(-1) == y).float().mean().item()
        self.model.train()
        return acc


if __name__ == "__main__":
    FixMatch(SimpleNamespace(lr=0.03, ema_m=0.9, num_train_iter=60, batch_size=8, uratio=2, p_cutoff=0.95,
                             lambda_u=1.0, clip=1.0)).train()
