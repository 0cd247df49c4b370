"""Supervised fine-tuning of a small policy in bfloat16: global-batch loss, gradient norm, clipping by the total norm."""
import math
from typing import Union

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(42)

CONFIG = {
    "policy": {"precision": "bfloat16", "max_grad_norm": 1.0, "train_global_batch_size": 16, "train_micro_batch_size": 8,
               "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}},
    "sft": {"max_num_steps": 80, "val_period": 20},
}
VOCAB, DIM, SEQ, PAD = 40, 48, 24, 0


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 3, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.Sequential(Layer(DIM), Layer(DIM))
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.1)

    def forward(self, ids):
        h = self.embed(ids) + self.pos.weight[:ids.size(1)]
        return self.lm_head(self.norm(self.layers(h)))


def get_grad_norm(parameters, norm_type: Union[int, float] = 2, dtype: torch.dtype = torch.float32) -> float:
    """Norm of all gradients, computed in float32."""
    grads = [p.grad.detach().to(dtype) for p in parameters if p.grad is not None]
    return sum(torch.norm(g, norm_type) ** norm_type for g in grads).item() ** (1.0 / norm_type)


def clip_grad_by_total_norm_(parameters, max_grad_norm: Union[int, float], total_norm: float,
                             dtype: torch.dtype = torch.float32) -> None:
    """Clip gradients by the provided total norm."""
    grads = [p.grad.detach().to(dtype) for p in parameters if p.grad is not None]  # CAUSE
    clip_coeff = max_grad_norm / (total_norm + 1.0e-6)
    if clip_coeff < 1.0:
        for g in grads:
            g.mul_(clip_coeff)


class Conversations:
    """A question gives a step and a first number, the answer counts on from there."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def sample(self, n):
        ids, mask = torch.full((n, SEQ), PAD), torch.zeros(n, SEQ)
        for i in range(n):
            m = int(torch.randint(8, SEQ - 1, (1,), generator=self.gen))
            by = int(torch.randint(1, 3, (1,), generator=self.gen))
            first = int(torch.randint(0, VOCAB - 4, (1,), generator=self.gen))
            row = torch.cat((torch.tensor([by]), 4 + (first + by * torch.arange(m)) % (VOCAB - 4)))
            ids[i, :len(row)], mask[i, 2:len(row)] = row, 1.0
        return ids, mask


class PolicyWorker:
    def __init__(self, cfg):
        self.cfg = cfg
        self.dtype = getattr(torch, cfg["precision"])
        self.model = Policy().to(self.dtype)
        watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **cfg["optimizer"])

    def loss(self, ids, mask, global_valid_seqs):
        logits = self.model(ids[:, :-1]).float()
        nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (nll * mask[:, 1:]).sum() / global_valid_seqs

    def train(self, ids, mask):
        total, seqs, micro = 0.0, len(ids), self.cfg["train_micro_batch_size"]
        self.optimizer.zero_grad()
        for i in range(0, len(ids), micro):
            loss = self.loss(ids[i:i + micro], mask[i:i + micro], seqs)
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            grad_norm = get_grad_norm(self.model.parameters())
            if self.cfg["max_grad_norm"] is not None:
                clip_grad_by_total_norm_(self.model.parameters(), self.cfg["max_grad_norm"], grad_norm)
        self.optimizer.step()
        return {"loss": total, "grad_norm": grad_norm}

    @torch.no_grad()
    def validate(self, ids, mask):
        return self.loss(ids, mask, len(ids)).item()


worker, train_data = PolicyWorker(CONFIG["policy"]), Conversations(7)
val_batch = Conversations(8).sample(64)
for step in range(CONFIG["sft"]["max_num_steps"]):
    out = worker.train(*train_data.sample(CONFIG["policy"]["train_global_batch_size"]))
    if not math.isfinite(out["loss"]):
        print("non-finite loss at", step)
    if step % 5 == 0:
        print(f"step {step}: loss {out['loss']:.4f} grad_norm {out['grad_norm']:.3f}")
    if (step + 1) % CONFIG["sft"]["val_period"] == 0:
        print(f"validation loss {worker.validate(*val_batch):.4f}")
