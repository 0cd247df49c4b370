"""Half-precision transformer with float32 masters; the optimizer wrapper clips the norm of the whole model."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)

VOCAB, PAD = 48, 0


class OSS:
    """The optimizer of one shard: half-precision parameters outside, float32 copies inside."""

    def __init__(self, params, optim, **defaults):
        self.params = list(params)
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.optim = optim(self.master, **defaults)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def clip_grad_norm(self, max_norm, norm_type=2.0):
        """Clips all gradients together, as torch.nn.utils.clip_grad_norm_ does for a single process."""
        local_params = [p for p in self.params if p.grad is not None]
        local_norm = torch.norm(torch.stack([torch.norm(p.grad.detach(), p=norm_type) for p in local_params]), p=norm_type)
        total_norm = local_norm ** norm_type  # CAUSE
        # here the shards add theirs
        total_norm = total_norm ** (1.0 / norm_type)
        clip_coef = torch.tensor(max_norm, dtype=total_norm.dtype) / (total_norm + 1e-6)
        if clip_coef < 1:
            for p in local_params:
                p.grad.detach().mul_(clip_coef)
        return total_norm

    def step(self):
        for p, m in zip(self.params, self.master):
            m.grad = None if p.grad is None else p.grad.float()
        self.optim.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.master):
                p.copy_(m)


class TransformerLM(nn.Module):
    def __init__(self, d=48, heads=4, layers=2):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, d, padding_idx=PAD), nn.Embedding(64, d)
        layer = nn.TransformerEncoderLayer(d, heads, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, x):
        t = x.size(1)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        h = self.embed(x) + self.pos.weight[:t]
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.out(self.norm(h))


def collate(gen, sentences, longest):
    """Source, then the same words in reverse; the loss is a sum over the tokens, as in fairseq."""
    half = longest // 2
    src = torch.randint(3, VOCAB, (sentences, half), generator=gen)
    return torch.cat([torch.ones(sentences, 1, dtype=torch.long), src, torch.full((sentences, 1), 2), src.flip(1)], 1)


class Trainer:
    def __init__(self, model, lr=3e-3, clip_norm=25.0, warmup=10):
        self.model, self.clip_norm, self.lr, self.warmup = model, clip_norm, lr, warmup
        self.optimizer = OSS(model.parameters(), torch.optim.Adam, lr=lr, betas=(0.9, 0.98))

    def train_step(self, step, tokens):
        for group in self.optimizer.optim.param_groups:
            group["lr"] = self.lr * min(1.0, (step + 1) / self.warmup)
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        self.optimizer.zero_grad()
        loss.backward()
        gnorm = self.optimizer.clip_grad_norm(self.clip_norm)
        self.optimizer.step()
        return loss.item() / (tokens.size(0) * (tokens.size(1) - 1)), gnorm.item()


def main():
    torch.manual_seed(19)
    model = TransformerLM().half()
    watch(model)
    trainer = Trainer(model)
    gen = torch.Generator().manual_seed(20)
    for step in range(90):
        sentences, longest = (8, 12) if step < 40 else (32, 20)  # larger batches after the warm-up
        loss, gnorm = trainer.train_step(step, collate(gen, sentences, longest))
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f} gnorm {gnorm:.1f} bsz {sentences}")


if __name__ == "__main__":
    main()
