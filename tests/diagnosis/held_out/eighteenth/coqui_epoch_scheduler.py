"""Acoustic model of a small speech synthesis recipe, in the trainer that may step its scheduler after each epoch."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(115)


@dataclass
class TrainConfig:
    mixed_precision: bool = True
    scheduler_after_epoch: bool = True
    epochs: int = 10
    batches: int = 8
    lr: float = 4e-2
    lr_gamma: float = 0.7
    grad_clip: float = 5.0


class AcousticModel(nn.Module):
    def __init__(self, phonemes=24, d=48, mels=20):
        super().__init__()
        self.emb = nn.Embedding(phonemes, d)
        self.encoder = nn.Sequential(nn.Conv1d(d, d, 5, padding=2), nn.ReLU(), nn.Conv1d(d, d, 5, padding=2), nn.ReLU())
        self.decoder = nn.GRU(d, d, batch_first=True)
        self.to_mel = nn.Linear(d, mels)

    def forward(self, phonemes):
        x = self.encoder(self.emb(phonemes).transpose(1, 2)).transpose(1, 2).repeat_interleave(2, 1)
        return self.to_mel(self.decoder(x.float())[0])

    def train_step(self, batch):
        outputs = self(batch["phonemes"])
        return outputs, {"loss": F.l1_loss(outputs.float(), batch["mel"])}


class Utterances:
    def __init__(self):
        gen = torch.Generator().manual_seed(116)
        self.table = torch.randn(24, 20, generator=gen)

    def batch(self, gen, n=8, length=14):
        phonemes = torch.randint(0, 24, (n, length), generator=gen)
        smooth = F.avg_pool1d(F.pad(self.table[phonemes].transpose(1, 2), (1, 1), mode="replicate"), 3, 1).transpose(1, 2)
        mel = smooth.repeat_interleave(2, 1)
        return {"phonemes": phonemes, "mel": mel + 0.05 * torch.randn(mel.shape, generator=gen)}


class Trainer:
    def __init__(self, config, model, data):
        self.config, self.model, self.data = config, model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.8, 0.99), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=config.lr_gamma)
        self.use_amp_scaler = config.mixed_precision
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14) if self.use_amp_scaler else None
        self._stepped_optimizers = set()
        self.total_steps_done = 0

    def optimize(self, batch, optimizer_idx=0):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.config.mixed_precision):
            outputs, loss_dict = self.model.train_step(batch)
        update_lr_scheduler = True
        if self.use_amp_scaler:
            self.scaler.scale(loss_dict["loss"]).backward()
            self.scaler.unscale_(self.optimizer)
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            scale_prev = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            update_lr_scheduler = scale_prev <= self.scaler.get_scale()
        else:
            loss_dict["loss"].backward()
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self.optimizer.step()
            self._stepped_optimizers.add(optimizer_idx)
        if update_lr_scheduler and not self.config.scheduler_after_epoch:
            self.scheduler.step()
        return loss_dict["loss"].item(), grad_norm.item()

    def train_epoch(self, gen):
        self.model.train()
        losses = []
        for _ in range(self.config.batches):
            loss, _ = self.optimize(self.data.batch(gen))
            losses.append(loss)
            self.total_steps_done += 1
        if self.config.scheduler_after_epoch:
            if 0 in self._stepped_optimizers:  # CAUSE
                self.scheduler.step()
        self._stepped_optimizers.clear()
        return sum(losses) / len(losses)

    @torch.no_grad()
    def eval_epoch(self):
        self.model.eval()
        gen = torch.Generator().manual_seed(1)
        return sum(self.model.train_step(self.data.batch(gen))[1]["loss"].item() for _ in range(3)) / 3

    def fit(self):
        gen = torch.Generator().manual_seed(117)
        for epoch in range(self.config.epochs):
            loss = self.train_epoch(gen)
            print(f"EPOCH {epoch} step {self.total_steps_done} avg_loss {loss:.4f} eval {self.eval_epoch():.4f} current_lr {self.optimizer.param_groups[0]['lr']:.2e}")


model = AcousticModel()
watch(model)
Trainer(TrainConfig(), model, Utterances()).fit()
