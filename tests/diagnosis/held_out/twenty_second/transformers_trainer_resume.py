"""Regression of a sentence score with a Trainer in the manner of transformers (fp16), stopped and resumed from a checkpoint folder."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11663)
VOCAB, HIDDEN, LENGTH, BATCH, SAVE_STEPS, MAX_STEPS = 50, 32, 10, 16, 45, 90


class DistilForSequenceRegression(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.norm, self.transformer = nn.LayerNorm(HIDDEN), nn.TransformerEncoderLayer(
            HIDDEN, 4, 2 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True)
        self.pre_classifier, self.classifier = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, input_ids, labels):
        h = self.transformer(self.norm(self.embeddings(input_ids) + self.positions.weight))
        logits = self.classifier(F.relu(self.pre_classifier(h.mean(1)))).squeeze(-1).float()
        return F.mse_loss(logits, labels)


class ScoredSentences:
    """The score, from 0 to 10, is the share of words of the upper half, with noise."""

    def __init__(self, seed=3):
        self.gen = torch.Generator().manual_seed(seed)

    def __next__(self):
        share = torch.rand(BATCH, 1, generator=self.gen)
        upper = torch.rand(BATCH, LENGTH, generator=self.gen) < share
        ids = torch.randint(0, VOCAB // 2, (BATCH, LENGTH), generator=self.gen) + upper * (VOCAB // 2)
        return {"input_ids": ids, "labels": 10 * upper.float().mean(1) + 0.2 * torch.randn(BATCH, generator=self.gen)}


class Trainer:
    def __init__(self, model, train_dataset, output_dir, learning_rate=6e-3, max_steps=MAX_STEPS, stop_at=None):
        self.model, self.data, self.output_dir = model, train_dataset, output_dir
        self.max_steps, self.stop_at, self.global_step = max_steps, stop_at or max_steps, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: max(0.05, 1 - s / max_steps))
        self.scaler = torch.amp.GradScaler("cpu")

    def _save_checkpoint(self):
        folder = os.path.join(self.output_dir, f"checkpoint-{self.global_step}")
        os.makedirs(folder)
        torch.save(self.model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
        torch.save(self.optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, "scheduler.pt"))
        torch.save({"global_step": self.global_step}, os.path.join(folder, "trainer_state.pt"))

    def _load_checkpoint(self, folder):
        self.model.load_state_dict(torch.load(os.path.join(folder, "pytorch_model.bin")))
        self.optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(folder, "scheduler.pt")))
        self.global_step = torch.load(os.path.join(folder, "trainer_state.pt"))["global_step"]  # CAUSE

    def training_step(self, inputs):
        self.model.train()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(**inputs)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def train(self, resume_from_checkpoint=None):
        if resume_from_checkpoint is not None:
            self._load_checkpoint(resume_from_checkpoint)
        tr_loss = 0.0
        while self.global_step < self.stop_at:
            tr_loss += self.training_step(next(self.data)).item()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.lr_scheduler.step()
            self.model.zero_grad()
            self.global_step += 1
            if self.global_step % 9 == 0:
                print({"loss": round(tr_loss / 9, 3), "learning_rate": round(self.lr_scheduler.get_last_lr()[0], 6),
                       "step": self.global_step, "scale": self.scaler.get_scale()})
                tr_loss = 0.0
            if self.global_step == SAVE_STEPS:
                self._save_checkpoint()


model, data = DistilForSequenceRegression(), ScoredSentences()
watch(model)
with tempfile.TemporaryDirectory() as output_dir:
    Trainer(model, data, output_dir, stop_at=SAVE_STEPS).train()
    Trainer(model, data, output_dir).train(resume_from_checkpoint=os.path.join(output_dir, f"checkpoint-{SAVE_STEPS}"))
MODULES = (model,)
