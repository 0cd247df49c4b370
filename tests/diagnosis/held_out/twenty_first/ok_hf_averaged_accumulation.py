"""Sentence-pair classification with accumulated gradients in a small trainer, fp16 with gradient scaling."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8486)
VOCAB, SEQ, DIM, LABELS = 40, 16, 48, 3


class EncoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.dense, self.norm1, self.norm2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        x = self.norm1(x + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)))
        return self.norm2(x + self.ff(x))


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.encoder, self.classifier = nn.Sequential(EncoderLayer(DIM), EncoderLayer(DIM)), nn.Linear(DIM, LABELS)
        for emb in (self.words, self.positions):
            nn.init.normal_(emb.weight, std=0.3)

    def forward(self, input_ids, labels):
        logits = self.classifier(self.encoder(self.words(input_ids) + self.positions.weight).mean(1))
        return F.cross_entropy(logits.float(), labels), logits


class TrainingArguments:
    learning_rate, max_grad_norm, max_steps = 2e-3, 1.0, 50
    gradient_accumulation_steps, per_device_train_batch_size, logging_steps = 4, 8, 5


class PairDataset:
    """The topic shows in about half of the words of the premise; the rest says nothing."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n):
        half = SEQ // 2
        premise = torch.randint(0, VOCAB, (n, half), generator=self.gen)
        other = torch.randint(0, VOCAB, (n, half), generator=self.gen)
        topic = torch.randint(0, 3, (n, 1), generator=self.gen)
        premise = torch.where(torch.rand(n, half, generator=self.gen) < 0.5, topic * 13 + premise % 13, premise)
        labels = topic.squeeze(1)
        return torch.cat((premise, other), dim=1), labels


class Trainer:
    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.train_dataset = model, args, train_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        self.losses = []

    def training_step(self, inputs):
        self.model.train()
        with torch.autocast("cpu", dtype=torch.float16):
            loss, _ = self.model(*inputs)
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        self.scaler.scale(loss).backward()
        return loss.detach()

    def train(self):
        args = self.args
        for global_step in range(1, args.max_steps + 1):
            tr_loss = torch.tensor(0.0)
            for _ in range(args.gradient_accumulation_steps):
                tr_loss += self.training_step(self.train_dataset.batch(args.per_device_train_batch_size))
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.model.zero_grad()
            self.losses.append(tr_loss.item())
            if global_step % args.logging_steps == 0:
                recent = self.losses[-args.logging_steps:]
                print({"loss": round(sum(recent) / len(recent), 4), "step": global_step, "scale": self.scaler.get_scale()})


model = SequenceClassifier()
watch(model)
trainer = Trainer(model, TrainingArguments(), PairDataset(seed=12))
trainer.train()
losses = trainer.losses
MODULES = (model,)
