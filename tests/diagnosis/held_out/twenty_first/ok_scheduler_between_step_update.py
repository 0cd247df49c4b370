"""Text classification with a linear warm-up schedule; the scheduler is stepped between the scaler's step and update."""
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(44511)
VOCAB, SEQ, DIM, CLASSES = 60, 14, 40, 4


class TextCNN(nn.Module):
    def __init__(self, widths=(2, 3, 4), channels=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.convs = nn.ModuleList(nn.Conv1d(DIM, channels, w) for w in widths)
        self.norm, self.fc = nn.LayerNorm(len(widths) * channels), nn.Linear(len(widths) * channels, CLASSES)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        pooled = [F.relu(conv(x)).amax(-1) for conv in self.convs]
        return self.fc(self.norm(torch.cat(pooled, dim=1)))


def sentences(gen, n=24):
    """Each class has a few phrases of three words that stand somewhere in the sentence."""
    phrases = torch.randint(0, VOCAB, (CLASSES, 5, 3), generator=torch.Generator().manual_seed(6))
    ids, labels = torch.randint(0, VOCAB, (n, SEQ), generator=gen), torch.randint(0, CLASSES, (n,), generator=gen)
    which, start = torch.randint(0, 5, (n,), generator=gen), torch.randint(0, SEQ - 3, (n, 1), generator=gen)
    return ids.scatter(1, start + torch.arange(3), phrases[labels, which]), labels


def linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        return max(0.05, (num_training_steps - step) / (num_training_steps - num_warmup_steps))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


class Trainer:
    def __init__(self, model, num_training_steps=100, lr=5e-3):
        self.model, self.criterion = model, nn.CrossEntropyLoss(reduction="sum")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.lr_scheduler = linear_schedule_with_warmup(self.optimizer, 8, num_training_steps)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        self.num_training_steps, self.losses, self.seen_warnings = num_training_steps, [], []

    def _process(self, ids, labels):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            preds = self.model(ids)
            loss = self.criterion(preds.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 25.0)
        self.scaler.step(self.optimizer)
        self.lr_scheduler.step()
        self.scaler.update()
        return loss.item() / len(labels), (preds.argmax(1) == labels).float().mean().item()

    def train(self, gen):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, self.num_training_steps + 1):
                loss, accuracy = self._process(*sentences(gen))
                self.losses.append(loss)
                if step % 10 == 0:
                    mean = sum(self.losses[-10:]) / 10
                    print(f"step {step} loss {mean:.4f} accuracy {accuracy:.2f} "
                          f"lr {self.lr_scheduler.get_last_lr()[0]:.2e} scale {self.scaler.get_scale():g}")
        self.seen_warnings = sorted({str(w.message).split(".")[0] for w in caught})

    @torch.no_grad()
    def evaluate(self, gen, batches=4):
        self.model.eval()
        hits = 0.0
        for _ in range(batches):
            ids, labels = sentences(gen, n=64)
            with torch.autocast("cpu", dtype=torch.float16):
                hits += (self.model(ids).argmax(1) == labels).float().mean().item() / batches
        return hits


model = TextCNN()
watch(model)
trainer = Trainer(model)
trainer.train(torch.Generator().manual_seed(1))
losses = trainer.losses
print("warnings:", trainer.seen_warnings)
print(f"held-out accuracy {trainer.evaluate(torch.Generator().manual_seed(2)):.3f}")
MODULES = (model,)
