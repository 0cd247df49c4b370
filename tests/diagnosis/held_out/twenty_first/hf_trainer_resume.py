"""Language-model fine-tuning with a Trainer that is stopped and resumed from its last checkpoint."""
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
VOCAB, SEQ, DIM = 26, 20, 48


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.h, self.ln_f, self.lm_head = nn.Sequential(Block(DIM), Block(DIM)), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.ln_f(self.h(self.wte(input_ids) + self.wpe.weight[:input_ids.size(1)])))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class TextDataset:
    """Letters that count on in steps of one to three; item i is always the same."""

    def batch(self, step, size):
        gen = torch.Generator().manual_seed(1000 + step)
        start, stride = (torch.randint(lo, hi, (size, 1), generator=gen) for lo, hi in ((0, VOCAB), (1, 4)))
        return (start + stride * torch.arange(SEQ)) % VOCAB


class Trainer:
    def __init__(self, model, train_dataset, output_dir, max_steps, save_steps, learning_rate=4e-3, batch_size=16):
        self.model, self.train_dataset, self.output_dir = model, train_dataset, output_dir
        self.max_steps, self.save_steps, self.batch_size = max_steps, save_steps, batch_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 - 0.8 * s / max_steps)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)  # CAUSE
        self.global_step = 0

    def _save_checkpoint(self):
        folder = os.path.join(self.output_dir, f"checkpoint-{self.global_step}")
        os.makedirs(folder, exist_ok=True)
        torch.save(self.model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
        torch.save(self.optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, "scheduler.pt"))
        torch.save({"global_step": self.global_step}, os.path.join(folder, "trainer_state.pt"))  # CAUSE

    def _load_checkpoint(self, folder):
        self.model.load_state_dict(torch.load(os.path.join(folder, "pytorch_model.bin")))
        self.optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(folder, "scheduler.pt")))
        self.global_step = torch.load(os.path.join(folder, "trainer_state.pt"))["global_step"]

    def training_step(self, input_ids):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(input_ids, labels=input_ids)
        self.scaler.scale(loss).backward()
        return loss.item() / input_ids[:, 1:].numel()

    def train(self, resume_from_checkpoint=None, stop_at=None):
        if resume_from_checkpoint:
            self._load_checkpoint(resume_from_checkpoint)
        while self.global_step < min(self.max_steps, stop_at or self.max_steps):
            tr_loss = self.training_step(self.train_dataset.batch(self.global_step, self.batch_size))
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 300.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.lr_scheduler.step()
            self.global_step += 1
            losses.append(tr_loss)
            if self.global_step % 10 == 0:
                print({"loss": round(tr_loss, 4), "step": self.global_step, "loss_scale": self.scaler.get_scale()})
            if self.global_step % self.save_steps == 0:
                self._save_checkpoint()


losses = []
model = CausalLM()
watch(model)
with tempfile.TemporaryDirectory() as output_dir:
    arguments = dict(train_dataset=TextDataset(), output_dir=output_dir, max_steps=90, save_steps=30)
    Trainer(model, **arguments).train(stop_at=30)
    for last in (30, 60):
        checkpoint = os.path.join(output_dir, f"checkpoint-{last}")
        Trainer(model, **arguments).train(resume_from_checkpoint=checkpoint, stop_at=last + 30)
MODULES = (model,)
