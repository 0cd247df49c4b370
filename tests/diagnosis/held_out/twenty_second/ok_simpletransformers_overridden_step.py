"""Sentence classification in the manner of simpletransformers: schedule first, then amp.initialize (O1), accumulation over two batches."""
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(80)
VOCAB, HIDDEN, LENGTH, LABELS, BATCH = 40, 32, 12, 3, 16
ARGS = {"learning_rate": 4e-3, "adam_epsilon": 1e-8, "warmup_steps": 6, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
        "num_batches": 140, "fp16_opt_level": "O1", "logging_steps": 10}


class amp:
    """apex.amp at level O1 on top of autocast: initialize() wraps forward and replaces optimizer.step."""
    scaler = None

    @classmethod
    def initialize(cls, model, optimizer, opt_level):
        cls.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        forward, step = model.forward, optimizer.step

        @functools.wraps(forward)
        def new_forward(*args, **kwargs):
            with torch.autocast("cpu", dtype=torch.float16):
                return forward(*args, **kwargs)

        @functools.wraps(step)
        def new_step(closure=None):
            optimizer.step = step
            cls.scaler.step(optimizer)
            cls.scaler.update()
            optimizer.step = new_step

        model.forward, optimizer.step = new_forward, new_step
        return model, optimizer


class RobertaForSequenceClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True)
        self.dense, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, LABELS)

    def forward(self, input_ids, labels):
        x = self.layer(self.norm(self.word(input_ids) + self.position.weight))
        logits = self.out_proj(torch.tanh(self.dense(x.mean(1)))).float()
        return F.cross_entropy(logits, labels), logits


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


def reviews(gen):
    """The label is the third of the vocabulary from which most of a sentence's words come."""
    labels = torch.randint(0, LABELS, (BATCH,), generator=gen)
    typical = 1 + 13 * labels[:, None] + torch.randint(0, 13, (BATCH, LENGTH), generator=gen)
    other = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=gen)
    return torch.where(torch.rand(BATCH, LENGTH, generator=gen) < 0.35, typical, other), labels


def train(model):
    gen = torch.Generator().manual_seed(6)
    t_total = ARGS["num_batches"] // ARGS["gradient_accumulation_steps"]
    no_decay = ["bias", "norm"]
    grouped = [{"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
               {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(grouped, lr=ARGS["learning_rate"], eps=ARGS["adam_epsilon"])
    scheduler = get_linear_schedule_with_warmup(optimizer, ARGS["warmup_steps"], t_total)
    model, optimizer = amp.initialize(model, optimizer, opt_level=ARGS["fp16_opt_level"])
    tr_loss, logging_loss, global_step = 0.0, 0.0, 0
    model.zero_grad()
    for step in range(ARGS["num_batches"]):
        loss, logits = model(*reviews(gen))
        loss = loss / ARGS["gradient_accumulation_steps"]
        amp.scaler.scale(loss).backward()
        tr_loss += loss.item()
        if (step + 1) % ARGS["gradient_accumulation_steps"] == 0:
            amp.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), ARGS["max_grad_norm"])
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            global_step += 1
            if global_step % ARGS["logging_steps"] == 0:
                print(f"Running loss: {(tr_loss - logging_loss) / ARGS['logging_steps']:.6f} lr {scheduler.get_last_lr()[0]:.2e} "
                      f"step {global_step} loss scale {amp.scaler.get_scale():g}")
                logging_loss = tr_loss
    return model


model = RobertaForSequenceClassification()
watch(model)
train(model)
MODULES = (model,)
