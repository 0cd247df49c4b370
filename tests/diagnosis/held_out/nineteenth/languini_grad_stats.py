"""Language-model trainer with gradient accumulation and a logger for statistics of weights, gradients and steps."""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)


class Logger:
    def __init__(self):
        self.rows = []

    def log(self, values, step):
        self.rows.append((step, values))
        print(f"[{step}] " + " ".join(f"{k}={v:.3g}" for k, v in values.items()))


def log_stats(tensors, name, log):
    logger, step = log
    flat = torch.cat([t.detach().float().flatten() for t in tensors])
    logger.log({f"{name}/mean": flat.mean().item(), f"{name}/std": flat.std().item(), f"{name}/norm": flat.norm().item(),
                f"{name}/absmax": flat.abs().max().item()}, step)


def log_weight_stats(model, name, log):
    log_stats(list(model.parameters()), name, log)


def log_gradient_stats(model, name, log):
    log_stats([p.grad for p in model.parameters() if p.grad is not None], name, log)  # CAUSE


def step_and_log_diff(scaler, opt, model, name, log):
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(opt)
    scaler.update()
    log_stats([p - b for p, b in zip(model.parameters(), before)], name, log)


class MLPMixerLM(nn.Module):
    """Causal token mixing by a lower triangular matrix, a cheap stand-in for attention."""

    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.h_dim)
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(c.seq_len, c.seq_len) * 0.1) for _ in range(c.n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(c.h_dim) for _ in range(2 * c.n_layers))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(c.h_dim, 2 * c.h_dim), nn.GELU(), nn.Linear(2 * c.h_dim, c.h_dim))
                                  for _ in range(c.n_layers))
        self.head = nn.Linear(c.h_dim, c.vocab_size)

    def forward(self, ids):
        h = self.embed(ids)
        for i, (mix, mlp) in enumerate(zip(self.mix, self.mlps)):
            h = h + torch.tril(mix) @ self.norms[2 * i](h)
            h = h + mlp(self.norms[2 * i + 1](h))
        return self.head(h)


class Books:
    """Sentences of a random grammar: each word allows four successors."""

    def __init__(self, c, seed):
        self.c, self.gen = c, torch.Generator().manual_seed(seed)
        self.table = torch.randint(0, c.vocab_size, (c.vocab_size, 4), generator=torch.Generator().manual_seed(5))

    def __next__(self):
        rows = self.c.train_batch_size
        ids = torch.randint(0, self.c.vocab_size, (rows, 1), generator=self.gen)
        for _ in range(self.c.seq_len):
            pick = torch.randint(0, 4, (rows,), generator=self.gen)
            ids = torch.cat((ids, self.table[ids[:, -1], pick][:, None]), 1)
        shape = (self.c.gradient_accumulation_steps, -1, self.c.seq_len)
        return ids[:, :-1].reshape(shape), ids[:, 1:].reshape(shape)


class LMTrainer:
    def __init__(self, config, logger, model, opt, train_batches, scheduler=None):
        self.c, self.logger, self.model, self.opt = config, logger, model, opt
        self.train_batches, self.scheduler = train_batches, scheduler
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=config.growth_interval)

    def train(self):
        c = self.c
        for step in range(c.max_train_steps):
            self.model.train()
            do_grads_log = c.log_grads_every > 0 and step % c.log_grads_every == 0 and step > 0
            total_batch_x, total_batch_y = next(self.train_batches)
            avg_loss = 0.0
            for micro_step in range(c.gradient_accumulation_steps):
                batch_x, batch_y = total_batch_x[micro_step], total_batch_y[micro_step]
                with torch.autocast("cpu", dtype=torch.float16):
                    logits = self.model(batch_x)
                    micro_avg_loss = F.cross_entropy(logits.float().flatten(0, 1), batch_y.flatten())
                avg_loss += micro_avg_loss.item() / c.gradient_accumulation_steps
                micro_avg_loss = micro_avg_loss / c.gradient_accumulation_steps
                self.scaler.scale(micro_avg_loss).backward()

            # clip gradients if clip is larger than 0.0
            if c.grad_clip_norm > 0.0:
                self.scaler.unscale_(self.opt)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip_norm)

            # perform an optimiser step and log weights, gradients, and step sizes
            if do_grads_log:
                log_weight_stats(self.model, "Weights", log=(self.logger, step))
                log_gradient_stats(self.model, "Grads", log=(self.logger, step))  # CAUSE
                step_and_log_diff(self.scaler, self.opt, self.model, "Step", log=(self.logger, step))
            else:
                self.scaler.step(self.opt)
                self.scaler.update()
            self.opt.zero_grad(set_to_none=True)
            if self.scheduler:
                self.scheduler.step()
            if step % c.log_terminal_every == 0:
                print(f"step={step:6d}  loss={avg_loss:0.5f}")


c = SimpleNamespace(vocab_size=48, h_dim=32, n_layers=2, seq_len=16, train_batch_size=16, gradient_accumulation_steps=2,
                    max_train_steps=91, grad_clip_norm=0.0, log_terminal_every=15, log_grads_every=10, growth_interval=25)
model = MLPMixerLM(c)
watch(model)
opt = torch.optim.Adam(model.parameters(), lr=6e-3, betas=(0.9, 0.95), eps=1e-8)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, c.max_train_steps, eta_min=6e-4)
LMTrainer(c, Logger(), model, opt, Books(c, 1), scheduler).train()
