"""A CTC recogniser in the style of ESPnet2's trainer: accum_grad, clipping, skipped updates are logged."""
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
torch.set_num_threads(1)
torch.manual_seed(131)


class TransformerCTC(nn.Module):
    def __init__(self, mels=20, d=48, tokens=9):
        super().__init__()
        self.subsample = nn.Conv1d(mels, d, 3, 2, 1)
        self.position = nn.Parameter(0.02 * torch.randn(64, d))
        self.encoder = nn.TransformerEncoderLayer(d, 4, 96, 0.0, batch_first=True)
        self.ctc_lo = nn.Linear(d, tokens)

    def forward(self, speech, text):
        h = F.relu(self.subsample(speech)).transpose(1, 2)
        h = self.encoder(h + self.position[: h.size(1)])
        ys_hat = self.ctc_lo(h).transpose(0, 1)
        n, t = text.shape
        return F.ctc_loss(ys_hat.float().log_softmax(2), text, torch.full((n,), ys_hat.size(0)), torch.full((n,), t), zero_infinity=True)


def utterances(gen, n=6, length=5):
    text = torch.randint(1, 9, (n, length), generator=gen)
    speech = 0.3 * torch.randn(n, 20, length * 12, generator=gen)
    for i in range(n):
        for k, token in enumerate(text[i].tolist()):
            speech[i, 2 * token:2 * token + 3, 12 * k:12 * k + 8] += 2.0
    return speech, text


class TrainerOptions:
    accum_grad, grad_clip, iterations, log_interval = 2, 5.0, 180, 20


class Trainer:
    def __init__(self, model, optimizers, schedulers, scaler, options):
        self.model, self.optimizers, self.schedulers = model, optimizers, schedulers
        self.scaler, self.options = scaler, options
        self.updates = self.skipped = 0

    def train(self, iterator):
        model, scaler, options = self.model, self.scaler, self.options
        reports = []
        for iiter in range(1, options.iterations + 1):
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
                loss = model(*next(iterator))
            reports.append(loss.item())
            loss = loss / options.accum_grad
            scaler.scale(loss).backward()
            if iiter % options.accum_grad == 0:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=options.grad_clip)
                if not torch.isfinite(grad_norm):
                    self.skipped += 1
                    if self.skipped <= 3:
                        logging.warning(f"The grad norm is {grad_norm}. Skipping updating the model.")
                    # scaler.update() must be invoked when unscale_() was
                    for optimizer in self.optimizers:
                        scaler.step(optimizer)
                        scaler.update()
                else:
                    for optimizer, scheduler in zip(self.optimizers, self.schedulers):
                        scaler.step(optimizer)
                        scaler.update()
                        scheduler.step()
                        optimizer.zero_grad()  # CAUSE
                    self.updates += 1
            if iiter % options.log_interval == 0:
                mean = sum(reports[-options.log_interval:]) / options.log_interval
                print(f"{iiter}batch loss_ctc={mean:.3f} scale={scaler.get_scale():g} updates={self.updates} skipped={self.skipped}")


def iterate(seed=132):
    gen = torch.Generator().manual_seed(seed)
    while True:
        yield utterances(gen)


model = TransformerCTC()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=8)
Trainer(model, [optimizer], [scheduler], scaler, TrainerOptions()).train(iterate())
