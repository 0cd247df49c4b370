"""Class-conditional autoregressive image generation over VQ tokens with a small state space model."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)


class TrainingArguments:
    bf16 = True
    learning_rate = 4e-4
    weight_decay = 0.05
    adam_betas = (0.9, 0.95)
    max_steps, warmup_steps, batch = 100, 5, 16


class SSMBlock(nn.Module):
    def __init__(self, dim, state=4, conv=3):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.conv = nn.Conv1d(dim, dim, conv, padding=conv - 1, groups=dim)
        self.x_proj = nn.Linear(dim, 2 * state + 1)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(dim, 1))
        self.D = nn.Parameter(torch.ones(dim))
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.state = state

    def forward(self, hidden, cond):
        t = hidden.shape[1]
        u, gate = self.in_proj(self.norm(hidden) * (1 + cond.unsqueeze(1))).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :t].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([1, self.state, self.state], -1)
        dt = F.softplus(dt)
        decay = torch.exp(-dt.unsqueeze(-1) * self.A_log.exp())
        drive = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        h, ys = 0.0, []
        for i in range(t):
            h = decay[:, i] * h + drive[:, i]
            ys.append((h * c[:, i].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, 1) + self.D * u
        return hidden + self.out_proj(y * F.silu(gate))


class AiM(nn.Module):
    def __init__(self, vocab=48, classes=8, dim=48, depth=2, seq=16):
        super().__init__()
        self.cls_embed = nn.Embedding(classes, dim)
        self.tok_embed = nn.Embedding(vocab, dim)
        self.pos_embed = nn.Parameter(torch.randn(seq, dim))
        self.ada = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(SSMBlock(dim) for _ in range(depth))
        self.norm_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, label):
        cls = self.cls_embed(label)
        x = torch.cat([cls.unsqueeze(1), self.tok_embed(tokens[:, :-1])], 1) + self.pos_embed
        cond = self.ada(F.silu(cls))
        for layer in self.layers:
            x = layer(x, cond)
        return self.lm_head(self.norm_f(x))


class Trainer:
    def __init__(self, model, args):
        self.args = args
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.model = model.to(dtype=dtype)  # CAUSE
        watch(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate,
                                           betas=args.adam_betas, weight_decay=args.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_lambda)
        gen = torch.Generator().manual_seed(3)
        self.codebook = torch.randint(0, 48, (8, 16), generator=gen)  # one prototype of 4 x 4 codes per class
        self.gen = gen

    def lr_lambda(self, step):
        if step < self.args.warmup_steps:
            return (step + 1) / self.args.warmup_steps
        done = (step - self.args.warmup_steps) / (self.args.max_steps - self.args.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))

    def batch(self):
        label = torch.randint(0, 8, (self.args.batch,), generator=self.gen)
        tokens = self.codebook[label].clone()
        noise = torch.rand(tokens.shape, generator=self.gen) < 0.1
        tokens[noise] = torch.randint(0, 48, (int(noise.sum()),), generator=self.gen)
        return tokens, label

    def train(self):
        for step in range(self.args.max_steps):
            tokens, label = self.batch()
            logits = self.model(tokens, label)
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0 or step == self.args.max_steps - 1:
                print(f"step {step:3d} loss {loss.item():.4f} lr {self.scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    Trainer(AiM(), TrainingArguments()).train()
