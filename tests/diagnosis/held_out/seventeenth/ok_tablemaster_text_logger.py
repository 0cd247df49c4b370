"""Table structure recognition with an mmcv-like runner; the text logger prints means over twenty iterations."""
from collections import OrderedDict, defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(201)
TOKENS, STEPS = 6, 8  # <td>, <td colspan>, </tr>, <tr>, end, pad


class TableMASTER(nn.Module):
    """A convolutional encoder and a decoder with two heads, one for tags, one for the boxes of the cells."""

    def __init__(self, d=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, d, 3, 2, 1), nn.ReLU())
        self.position = nn.Parameter(0.1 * torch.randn(24, d))
        self.embedding, self.step_position = nn.Embedding(TOKENS, d), nn.Parameter(0.1 * torch.randn(STEPS, d))
        self.layer = nn.TransformerDecoderLayer(d, 4, 96, 0.0, batch_first=True)
        self.cls_head, self.bbox_head = nn.Linear(d, TOKENS), nn.Linear(d, 4)

    def forward(self, img, tokens):
        memory = self.backbone(img).flatten(2).transpose(1, 2) + self.position
        shifted = torch.cat([torch.full_like(tokens[:, :1], 4), tokens[:, :-1]], 1)
        causal = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)
        h = self.layer(self.embedding(shifted) + self.step_position, memory, tgt_mask=causal)
        return self.cls_head(h), self.bbox_head(h).float().sigmoid()

    def train_step(self, img, tokens, boxes):
        logits, pred = self(img, tokens)
        cell = (tokens < 2).unsqueeze(-1)
        losses = OrderedDict(
            loss_ce=F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), ignore_index=5),
            horizon_bbox_loss=((pred - boxes)[..., 0::2].abs() * cell).sum() / cell.sum(),
            vertical_bbox_loss=((pred - boxes)[..., 1::2].abs() * cell).sum() / cell.sum())
        losses["loss"] = sum(losses.values())
        return losses


class Fp16OptimizerHook:
    def __init__(self, optimizer, grad_clip, init_scale):
        self.optimizer, self.grad_clip = optimizer, grad_clip
        self.loss_scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def after_train_iter(self, model, loss, buffer):
        self.optimizer.zero_grad()
        self.loss_scaler.scale(loss).backward()
        self.loss_scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), **self.grad_clip)
        buffer["grad_norm"].append(float(grad_norm))
        self.loss_scaler.step(self.optimizer)
        self.loss_scaler.update()


class TextLoggerHook:
    def __init__(self, interval=20):
        self.interval = interval

    def after_train_iter(self, iteration, buffer):
        if (iteration + 1) % self.interval == 0:
            print(f"Epoch [1][{iteration + 1}/100]\t" + ", ".join(f"{k}: {sum(v) / len(v):.4f}" for k, v in buffer.items()))
            buffer.clear()


def tables(gen, n=8):
    """One row of two to four cells, some of them two columns wide; 16 x 24 pixels with lines between the cells."""
    img, tokens = 0.05 * torch.randn(n, 1, 16, 24, generator=gen), torch.full((n, STEPS), 5)
    boxes = torch.zeros(n, STEPS, 4)
    for i in range(n):
        tags, x = [3], 0
        while x < 24:
            wide = bool(torch.rand(1, generator=gen) < 0.4) and x <= 12
            w = 12 if wide else 6
            img[i, 0, :, x] += 1.0
            img[i, 0, 4:12, x + 2:x + w - 1] += 0.5
            boxes[i, len(tags)] = torch.tensor([x / 24, 0.25, (x + w) / 24, 0.75])
            tags.append(int(wide))
            x += w
        tags += [2, 4]
        tokens[i, : len(tags)] = torch.tensor(tags)
    return img, tokens, boxes


def main():
    model = TableMASTER()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    hook = Fp16OptimizerHook(optimizer, {"max_norm": 30, "norm_type": 2}, init_scale=2.0 ** 20)
    logger, buffer = TextLoggerHook(), defaultdict(list)
    gen = torch.Generator().manual_seed(202)
    for iteration in range(100):
        with torch.autocast("cpu", dtype=torch.float16):
            losses = model.train_step(*tables(gen))
        for k, v in losses.items():
            buffer[k].append(v.item())
        hook.after_train_iter(model, losses["loss"], buffer)
        logger.after_train_iter(iteration, buffer)


if __name__ == "__main__":
    main()
