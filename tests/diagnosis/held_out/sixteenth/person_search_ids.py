"""Joint detection and re-identification: every box carries the number of the person in it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)

NUM_IDS, FIRST_ID, PEOPLE = 5532, 4101, 30


class Exp:
    fp16, max_iter, batch_size, basic_lr = True, 100, 24, 0.01


class DataPrefetcher:
    """Pictures of one person each, targets are (class, cx, cy, w, h, track_id)."""

    def __init__(self, batch_size, seed):
        shapes = torch.Generator().manual_seed(40)
        self.looks = torch.randn(PEOPLE, 3, 4, 3, generator=shapes)
        self.gen, self.batch_size = torch.Generator().manual_seed(seed), batch_size

    def next(self):
        n, g = self.batch_size, self.gen
        who = torch.randint(0, PEOPLE, (n,), generator=g)
        inps = 0.2 * torch.randn(n, 3, 20, 20, generator=g)
        body = F.interpolate(self.looks[who], size=(12, 9))
        top, left = torch.randint(2, 6, (n,), generator=g), torch.randint(3, 8, (n,), generator=g)
        for i in range(n):
            inps[i, :, top[i]:top[i] + 12, left[i]:left[i] + 9] += body[i]
        box = torch.stack([(left + 4.5) / 20, (top + 6) / 20, torch.full((n,), 9 / 20), torch.full((n,), 12 / 20)], 1)
        return inps, torch.cat([torch.zeros(n, 1), box, (FIRST_ID + who).float()[:, None]], 1)


class YOLOXReID(nn.Module):
    def __init__(self, c=16, d=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), nn.BatchNorm2d(c), nn.SiLU(),
                                      nn.Conv2d(c, c, 3, 2, 1), nn.BatchNorm2d(c), nn.SiLU())
        self.neck = nn.Sequential(nn.Linear(c * 25, 96), nn.SiLU())
        self.reg_pred = nn.Linear(96, 4)
        self.emb = nn.Linear(96, d)
        self.classifier = nn.Linear(d, NUM_IDS)

    def forward(self, x, targets=None):
        f = self.neck(self.backbone(x).flatten(1))
        box, ids = self.reg_pred(f), self.classifier(self.emb(f))
        if targets is None:
            return box, ids
        track_id = targets[:, 5].long()
        loss_iou = F.smooth_l1_loss(box.float(), targets[:, 1:5].float())
        loss_id = F.cross_entropy(ids.float(), track_id)
        return {"total_loss": 5 * loss_iou + loss_id, "iou_loss": loss_iou, "id_loss": loss_id}


class Trainer:
    def __init__(self, exp):
        self.exp = exp
        self.amp_training = exp.fp16
        self.scaler = torch.amp.GradScaler("cpu", enabled=exp.fp16, init_scale=2.0 ** 12)
        self.data_type = torch.float16 if exp.fp16 else torch.float32

    def before_train(self):
        torch.manual_seed(9)
        self.model = YOLOXReID()
        watch(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.exp.basic_lr)
        self.prefetcher = DataPrefetcher(self.exp.batch_size, seed=1)

    def train_one_iter(self):
        inps, targets = self.prefetcher.next()
        inps = inps.to(self.data_type)
        targets = targets.to(self.data_type)  # CAUSE
        targets.requires_grad = False
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.amp_training):
            outputs = self.model(inps, targets)
        loss = outputs["total_loss"]
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return outputs

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        inps, targets = DataPrefetcher(192, seed=2).next()
        box, ids = self.model(inps)
        top1 = (ids.argmax(1) == targets[:, 5].long()).float().mean().item()
        self.model.train()
        return top1, (box - targets[:, 1:5]).abs().mean().item()

    def train(self):
        self.before_train()
        for it in range(self.exp.max_iter):
            outputs = self.train_one_iter()
            if (it + 1) % 20 == 0:
                top1, error = self.evaluate()
                print(f"iter {it + 1} id_loss {outputs['id_loss'].item():.3f} iou_loss {outputs['iou_loss'].item():.4f} "
                      f"top-1 {top1:.3f} box error {error:.3f}")


Trainer(Exp()).train()
