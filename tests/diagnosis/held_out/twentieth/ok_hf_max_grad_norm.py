"""Token classification with a Trainer-like loop: max_grad_norm 1, gradient norms that stay far below it, mixed precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(41431)
VOCAB, LABELS, DIM, SEQ = 40, 5, 48, 16


class TrainingArguments:
    max_grad_norm, learning_rate, warmup_steps, max_steps, logging_steps = 1.0, 1e-3, 10, 100, 10
    per_device_train_batch_size, fp16 = 48, True


class EncoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.out, self.ln1, self.ln2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class TokenClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers, self.norm = nn.Sequential(EncoderLayer(DIM), EncoderLayer(DIM)), nn.LayerNorm(DIM)
        self.classifier = nn.Linear(DIM, LABELS)
        for e in (self.word, self.position):
            nn.init.normal_(e.weight, std=0.3)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, input_ids, labels):
        logits = self.classifier(self.norm(self.layers(self.word(input_ids) + self.position.weight)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def collate(gen, n):
    """A tag depends on the word and on the word before it; a tenth of the places is not scored."""
    ids = torch.randint(0, VOCAB, (n, SEQ), generator=gen)
    before = torch.cat((torch.zeros(n, 1, dtype=torch.long), ids[:, :-1]), dim=1)
    labels = (ids % LABELS + (before >= VOCAB // 2).long()) % LABELS
    return ids, torch.where(torch.rand(n, SEQ, generator=gen) < 0.1, -100, labels)


class Trainer:
    def __init__(self, model, args):
        self.model, self.args, self.state = model, args, {"log_history": []}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min((s + 1) / args.warmup_steps, (args.max_steps - s) / (args.max_steps - args.warmup_steps)))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, enabled=args.fp16)
        self.gen = torch.Generator().manual_seed(7)

    def training_step(self, inputs):
        self.model.train()
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16):
            loss, _ = self.model(*inputs)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def train(self):
        tr_loss = 0.0
        for step in range(self.args.max_steps):
            tr_loss += self.training_step(collate(self.gen, self.args.per_device_train_batch_size)).item()
            grad_norm = None
            if self.args.max_grad_norm is not None and self.args.max_grad_norm > 0:
                self.scaler.unscale_(self.optimizer)
                grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            scale_before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if scale_before <= self.scaler.get_scale():
                self.lr_scheduler.step()
            self.model.zero_grad()
            if (step + 1) % self.args.logging_steps == 0:
                logs = {"loss": round(tr_loss / self.args.logging_steps, 4), "grad_norm": round(grad_norm.item(), 4),
                        "learning_rate": self.lr_scheduler.get_last_lr()[0], "step": step + 1}
                self.state["log_history"].append(logs)
                print(logs)
                tr_loss = 0.0


model = TokenClassifier()
watch(model)
Trainer(model, TrainingArguments()).train()

MODULES = (model,)
