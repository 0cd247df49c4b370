"""Small one-class detector; the trainer writes last.pt with a halved optimizer to save space and is resumed from it."""
import copy
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(105)


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


def conv1(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class Detector(nn.Module):
    def __init__(self, c=12, wide=128):
        super().__init__()
        self.backbone = nn.Sequential(conv(3, c, 2), conv(c, 2 * c, 2), conv1(2 * c, wide), conv1(wide, wide), conv1(wide, wide))
        self.cls, self.box = nn.Conv2d(wide, 1, 1), nn.Conv2d(wide, 4, 1)
        nn.init.constant_(self.cls.bias, -4.0)

    def forward(self, x):
        f = self.backbone(x)
        return self.cls(f).squeeze(1), self.box(f)


class DetectionLoss:
    def __call__(self, preds, batch):
        logits, boxes = preds[0].float(), preds[1].float()
        pos = batch["mask"]
        cls = F.binary_cross_entropy_with_logits(logits, pos.float())
        box = F.smooth_l1_loss(boxes.permute(0, 2, 3, 1)[pos], batch["boxes"][pos])
        return 0.5 * cls + 0.1 * box, (cls.item(), box.item())


def convert_optimizer_state_dict_to_fp16(state_dict):
    """Halves every float32 tensor of the state but the step."""
    for state in state_dict["state"].values():
        for k, v in state.items():
            if k != "step" and isinstance(v, torch.Tensor) and v.dtype is torch.float32:
                state[k] = v.half()  # CAUSE
    return state_dict


def scenes(gen, n=6, size=32):
    img = 0.2 * torch.rand(n, 3, size, size, generator=gen)
    mask, boxes = torch.zeros(n, size // 4, size // 4, dtype=torch.bool), torch.zeros(n, size // 4, size // 4, 4)
    for i in range(n):
        cx, cy = (int(v) for v in torch.randint(6, size - 6, (2,), generator=gen))
        w, h = (int(v) for v in torch.randint(2, 6, (2,), generator=gen))
        img[i, :, cy - h:cy + h, cx - w:cx + w] += 0.7
        mask[i, cy // 4, cx // 4] = True
        boxes[i, cy // 4, cx // 4] = torch.tensor([cx % 4 / 4, cy % 4 / 4, w / 6, h / 6])
    return {"img": img, "mask": mask, "boxes": boxes}


class Trainer:
    def __init__(self, epochs=8, batches=10, resume=None):
        self.epochs, self.batches, self.start_epoch = epochs, batches, 0
        self.model = Detector()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.999), weight_decay=5e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        self.criterion = DetectionLoss()
        if resume is not None:
            self.resume_training(torch.load(resume, weights_only=False))
        watch(self.model)

    def resume_training(self, ckpt):
        self.model.load_state_dict(ckpt["model"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.scaler.load_state_dict(ckpt["scaler"])
        self.start_epoch = ckpt["epoch"] + 1

    def save_model(self, epoch):
        buffer = io.BytesIO()
        torch.save({"epoch": epoch, "model": self.model.state_dict(), "scaler": self.scaler.state_dict(),
                    "optimizer": convert_optimizer_state_dict_to_fp16(copy.deepcopy(self.optimizer.state_dict()))}, buffer)
        buffer.seek(0)
        return buffer

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, stop_after=None):
        last = None
        for epoch in range(self.start_epoch, self.epochs):
            gen = torch.Generator().manual_seed(200 + epoch)
            for i in range(self.batches):
                batch = scenes(gen)
                with torch.autocast("cpu", dtype=torch.float16):
                    preds = self.model(batch["img"])
                loss, items = self.criterion(preds, batch)
                self.scaler.scale(loss).backward()
                self.optimizer_step()
                if i % 3 == 0 or i == 1:
                    print(f"{epoch + 1}/{self.epochs} batch {i} cls_loss {items[0]:.4g} box_loss {items[1]:.4g}")
            last = self.save_model(epoch)
            if stop_after is not None and epoch + 1 == stop_after:
                break
        return last


last = Trainer().train(stop_after=6)
print("interrupted; resuming from last.pt")
Trainer(resume=last).train()
