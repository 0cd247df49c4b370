"""Masked language model with a small copy of the Trainer, everything in bfloat16 as under XLA_USE_BF16=1."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(31)
torch.set_default_dtype(torch.bfloat16)

VOCAB, MASK, LENGTH = 48, 47, 16


class BertForMaskedLM(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH, d)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 128, 0.0, batch_first=True), 2)
        self.decoder = nn.Linear(d, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.encoder(self.word(input_ids) + self.position.weight)
        logits = self.decoder(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class TrainingArguments:
    max_steps, gradient_accumulation_steps, logging_steps = 90, 4, 10
    learning_rate, per_device_train_batch_size, max_grad_norm = 2e-3, 8, 1.0


def sentences(gen, n):
    """Words go on by 1 or 2 of a ring of 47; one of six is masked."""
    start = torch.randint(0, MASK, (n, 1), generator=gen)
    stride = torch.randint(1, 3, (n, 1), generator=gen)
    ids = (start + stride * torch.arange(LENGTH)) % MASK
    masked = torch.randint(0, 6, ids.shape, generator=gen) == 0
    return ids.masked_fill(masked, MASK), ids.masked_fill(~masked, -100)


class Trainer:
    def __init__(self, model, args):
        self.model, self.args, self.global_step = model, args, 0
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, eps=1e-6)
        self.gen = torch.Generator().manual_seed(32)

    def training_step(self, inputs):
        loss = self.model(*inputs) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def log(self, logs):
        print({k: round(v, 4) for k, v in logs.items()})

    def evaluate(self):
        with torch.no_grad():
            gen = torch.Generator().manual_seed(33)
            return sum(self.model(*sentences(gen, 32)).item() for _ in range(4)) / 4

    def train(self):
        args = self.args
        tr_loss = torch.tensor(0.0)  # CAUSE
        logging_loss_scalar = 0.0
        micro_step = 0
        while self.global_step < args.max_steps:
            tr_loss += self.training_step(sentences(self.gen, args.per_device_train_batch_size))  # CAUSE
            micro_step += 1
            if micro_step % args.gradient_accumulation_steps:
                continue
            nn.utils.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            self.optimizer.step()
            self.model.zero_grad()
            self.global_step += 1
            if self.global_step % args.logging_steps == 0:
                tr_loss_scalar = tr_loss.item()
                self.log({"loss": (tr_loss_scalar - logging_loss_scalar) / args.logging_steps, "step": self.global_step})
                logging_loss_scalar = tr_loss_scalar
        return tr_loss.item() / self.global_step


model = BertForMaskedLM()
watch(model)
trainer = Trainer(model, TrainingArguments())
training_loss = trainer.train()
print(f"training_loss {training_loss:.4f} eval_loss {trainer.evaluate():.4f}")
