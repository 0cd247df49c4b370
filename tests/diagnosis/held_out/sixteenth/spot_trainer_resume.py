"""Token classification on a preemptible machine: the job is stopped now and then and goes on from its checkpoint."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self, vocab=60, d=48, classes=5):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.02 * torch.randn(1, 24, d))
        self.encoder = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.score = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, input_ids):
        h = self.encoder(self.embed(input_ids) + self.pos[:, : input_ids.size(1)])
        return self.score(self.norm(h))


class Corpus(torch.utils.data.Dataset):
    def __init__(self, n=1600):
        g = torch.Generator().manual_seed(31)
        self.labels = torch.randint(0, 5, (n,), generator=g)
        self.ids = torch.randint(0, 60, (n, 24), generator=g)
        topic = torch.rand(n, 24, generator=g) < 0.2
        words = 12 * self.labels[:, None] + torch.randint(0, 12, (n, 24), generator=g)
        self.ids = torch.where(topic, words, self.ids)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i].expand(24)


class Trainer:
    def __init__(self, model, dataset, max_steps=96, lr=2e-3, save_steps=24):
        self.model, self.dataset, self.max_steps, self.save_steps = model, dataset, max_steps, save_steps
        self.lr, self.global_step = lr, 0
        self.create_optimizer_and_scheduler()
        self.create_accelerator_and_postprocess()

    def create_optimizer_and_scheduler(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: max(0.0, 1 - s / self.max_steps))

    def create_accelerator_and_postprocess(self):
        self.scaler = torch.amp.GradScaler("cpu")  # CAUSE

    def save_checkpoint(self):
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.lr_scheduler.state_dict(), "global_step": self.global_step}, buffer)  # CAUSE
        return buffer

    def load_checkpoint(self, buffer):
        buffer.seek(0)
        state = torch.load(buffer)
        self.model.load_state_dict(state["model"])
        self.create_optimizer_and_scheduler()
        self.create_accelerator_and_postprocess()
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])
        self.global_step = state["global_step"]

    def training_step(self, ids, labels):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(ids)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= scale_before:  # not skipped
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return loss.item() / labels.numel(), norm.item()

    def train(self, until):
        """Returns the last checkpoint when the machine is taken away at step `until`."""
        loader = torch.utils.data.DataLoader(self.dataset, batch_size=16, shuffle=False)
        checkpoint = None
        for step, (ids, labels) in enumerate(loader):
            if step < self.global_step:
                continue
            loss, norm = self.training_step(ids, labels)
            self.global_step += 1
            if self.global_step % 8 == 0:
                print(f"step {self.global_step} loss {loss:.4f} grad_norm {norm:.2f} scale {self.scaler.get_scale():g} "
                      f"lr {self.lr_scheduler.get_last_lr()[0]:.2e}")
            if self.global_step % self.save_steps == 0:
                checkpoint = self.save_checkpoint()
            if self.global_step == until:
                return checkpoint


torch.manual_seed(2)
model = Classifier()
watch(model)
trainer = Trainer(model, Corpus())
for stop in (24, 48, 72, 96):
    saved = trainer.train(stop)
    if stop < 96:
        print(f"-- preempted, resuming from the checkpoint of step {trainer.global_step}")
        trainer.load_checkpoint(saved)
