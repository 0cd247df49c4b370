"""Seq2seq fine-tuning with label smoothing, fp16 training and --fp16_full_eval after every epoch."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)
VOCAB, LENGTH, PAD = 8000, 10, 0


class Seq2Seq(nn.Module):
    """Encoder and decoder that share the embeddings, as T5 does."""

    def __init__(self, d=32):
        super().__init__()
        self.shared, self.position = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH, d)
        nn.init.normal_(self.shared.weight, std=0.3)
        self.encoder = nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(d, 4, 64, 0.0, batch_first=True)
        self.lm_head = nn.Linear(d, VOCAB, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids, labels):
        memory = self.encoder(self.shared(input_ids) + self.position.weight)
        shifted = torch.cat([torch.full_like(labels[:, :1], PAD), labels[:, :-1].clamp(min=0)], 1)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.decoder(self.shared(shifted) + self.position.weight, memory, tgt_mask=causal)
        return self.lm_head(hidden)


class LabelSmoother:
    epsilon, ignore_index = 0.1, -100

    def __call__(self, logits, labels):
        log_probs = -F.log_softmax(logits, dim=-1)
        labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        nll_loss = log_probs.gather(dim=-1, index=labels.clamp_min(0))
        smoothed_loss = log_probs.sum(dim=-1, keepdim=True)  # CAUSE
        nll_loss.masked_fill_(padding_mask, 0.0)
        smoothed_loss.masked_fill_(padding_mask, 0.0)
        num_active_elements = padding_mask.numel() - padding_mask.long().sum()
        nll_loss = nll_loss.sum() / num_active_elements
        smoothed_loss = smoothed_loss.sum() / (num_active_elements * log_probs.shape[-1])
        return (1 - self.epsilon) * nll_loss + self.epsilon * smoothed_loss


def sentence_pairs(gen, n):
    """The translation of word w is w + 200; half of the sentences are shorter and padded."""
    source = torch.randint(1, 30, (n, LENGTH), generator=gen)
    labels = source + 200
    short = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=gen)
    padded = torch.arange(LENGTH) >= short
    return source.masked_fill(padded, PAD), labels.masked_fill(padded, -100)


class Trainer:
    def __init__(self, model, epochs=4, steps_per_epoch=22, batch_size=10):
        self.model, self.epochs, self.steps_per_epoch, self.batch_size = model, epochs, steps_per_epoch, batch_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        self.label_smoother = LabelSmoother()
        self.gen = torch.Generator().manual_seed(62)

    def training_step(self, inputs, labels):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(inputs, labels)
        loss = self.label_smoother(logits.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        model = copy.deepcopy(self.model).to(torch.float16)  # fp16_full_eval
        model.eval()
        inputs, labels = sentence_pairs(torch.Generator().manual_seed(63), 16)
        logits = model(inputs, labels)
        hit = (logits.argmax(-1) == labels)[labels >= 0].float().mean().item()
        return self.label_smoother(logits, labels).item(), hit

    def train(self):
        for epoch in range(self.epochs):
            losses = [self.training_step(*sentence_pairs(self.gen, self.batch_size)) for _ in range(self.steps_per_epoch)]
            eval_loss, accuracy = self.evaluate()
            print(f"epoch {epoch + 1} loss {sum(losses) / len(losses):.4f} eval_loss {eval_loss:.4f} eval_accuracy {accuracy:.3f}")


model = Seq2Seq()
watch(model)
Trainer(model).train()
