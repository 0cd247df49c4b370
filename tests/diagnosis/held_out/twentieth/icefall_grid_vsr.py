"""Lip-reading recipe: visual front end, small encoder with CTC, Eden-like schedule, mixed precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2081)
VOCAB = ["<blk>", "bin", "lay", "place", "set", "blue", "green", "red", "at", "by", "in"]
FRAMES, MOUTH, DIM = 30, 36, 48


class AttributeDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


params = AttributeDict(use_fp16=True, base_lr=0.3, lr_batches=60, batch_idx_train=0, log_interval=10, num_batches=100)


class ConvModule(nn.Module):
    def __init__(self, d, kernel=5):
        super().__init__()
        self.norm, self.glu, self.out = nn.LayerNorm(d), nn.Linear(kernel * d, 2 * d), nn.Linear(d, d)
        self.pad = kernel // 2
        self.kernel = kernel

    def forward(self, x):
        y = F.pad(self.norm(x), (0, 0, self.pad, self.pad))
        y = torch.cat([y[:, i:i + x.size(1)] for i in range(self.kernel)], dim=-1)
        return x + self.out(F.glu(self.glu(y), dim=-1))


class VSRModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = nn.Sequential(nn.Linear(MOUTH, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.encoder = nn.Sequential(ConvModule(DIM), ConvModule(DIM))
        self.ctc_output = nn.Linear(DIM, len(VOCAB))

    def forward(self, video):
        return self.ctc_output(self.encoder(self.frontend(video)))


class Eden:
    """Learning rate that decays with the batch count, after a short warm-up."""

    def __init__(self, optimizer, base_lr, lr_batches, warmup=8):
        self.optimizer, self.base_lr, self.lr_batches, self.warmup = optimizer, base_lr, lr_batches, warmup
        self.step_batch(0)

    def step_batch(self, batch):
        factor = ((batch ** 2 + self.lr_batches ** 2) / self.lr_batches ** 2) ** -0.25
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * factor * min(1.0, (batch + 1) / self.warmup)


class GridDataset:
    """Three-word commands; a word is a mouth shape that is held for some frames, with blends and noise."""

    def __init__(self, seed=11):
        self.gen = torch.Generator().manual_seed(seed)
        self.shapes = torch.randn(len(VOCAB), MOUTH, generator=torch.Generator().manual_seed(4))

    def batch(self, n=8):
        video = 0.4 * torch.randn(n, FRAMES, MOUTH, generator=self.gen)
        words = torch.stack([torch.randint(1, 5, (n,), generator=self.gen), torch.randint(5, 8, (n,), generator=self.gen),
                             torch.randint(8, 11, (n,), generator=self.gen)], dim=1)
        lengths = torch.zeros(n, dtype=torch.long)
        for i in range(n):
            t = int(torch.randint(1, 4, (1,), generator=self.gen))
            for w in words[i]:
                d = int(torch.randint(4, 8, (1,), generator=self.gen))
                video[i, t:t + d] += self.shapes[w]
                t += d + int(torch.randint(0, 2, (1,), generator=self.gen))
            lengths[i] = min(FRAMES, t + 1)
        return {"video": video, "video_lens": lengths, "words": words}


def compute_loss(params, model, batch):
    with torch.autocast("cpu", dtype=torch.float16, enabled=params.use_fp16):
        ctc_output = model(batch["video"])
    log_probs = F.log_softmax(ctc_output.float(), dim=-1).transpose(0, 1)
    target_lens = torch.full((len(batch["words"]),), 3)
    loss = F.ctc_loss(log_probs, batch["words"], batch["video_lens"], target_lens, reduction="sum")
    return loss, int(batch["video_lens"].sum())


def train_one_epoch(params, model, optimizer, scheduler, train_dl, scaler):
    tot_loss = 0.0
    for _ in range(params.num_batches):
        params.batch_idx_train += 1
        batch = train_dl.batch()
        loss, frames = compute_loss(params, model, batch)
        scaler.scale(loss / len(batch["words"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # CAUSE
        scheduler.step_batch(params.batch_idx_train)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tot_loss = 0.9 * tot_loss + 0.1 * loss.item() / frames if tot_loss else loss.item() / frames
        if params.batch_idx_train % params.log_interval == 0:
            print(f"batch {params.batch_idx_train}, loss[loss={loss.item() / frames:.4f}, over {frames} frames.], "
                  f"tot_loss[{tot_loss:.4f}], lr: {optimizer.param_groups[0]['lr']:.2e}, grad_scale: {scaler.get_scale():g}")


model = VSRModel()
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=params.base_lr, momentum=0.5)
scheduler = Eden(optimizer, params.base_lr, params.lr_batches)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=50, enabled=params.use_fp16)
train_one_epoch(params, model, optimizer, scheduler, GridDataset(), scaler)

MODULES = (model,)
