"""Reward model for RLHF: pairs of answers ranked by a small language model that is loaded in float16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(69)
VOCAB, HIDDEN, HEADS, LENGTH, PAD = 32, 40, 4, 14, 0


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d), RMSNorm(d)
        self.qkv_proj, self.o_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down_proj = nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv_proj(self.input_layernorm(x)).chunk(3, -1))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class AutoModelForSequenceClassification(nn.Module):
    def __init__(self, num_labels=1):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([DecoderLayer(HIDDEN), DecoderLayer(HIDDEN)])
        self.norm, self.score = RMSNorm(HIDDEN), nn.Linear(HIDDEN, num_labels, bias=False)

    @classmethod
    def from_pretrained(cls, torch_dtype, num_labels=1):
        return cls(num_labels).to(torch_dtype)

    def forward(self, input_ids, attention_mask):
        h = self.embed_tokens(input_ids)
        for layer in self.layers:
            h = layer(h)
        last = attention_mask.sum(1) - 1
        return self.score(self.norm(h))[torch.arange(len(h)), last]


class PreferenceData:
    """Answers of 5 to 9 tokens after a prompt; the reader prefers the one with more tokens of the upper half."""

    def __init__(self, seed=7):
        self.gen = torch.Generator().manual_seed(seed)

    def answer(self, prompt):
        n = int(torch.randint(5, 10, (1,), generator=self.gen))
        ids = torch.cat((prompt, torch.randint(1, VOCAB, (n,), generator=self.gen)))
        quality = (ids[4:] >= VOCAB // 2).float().mean()
        padded = torch.full((LENGTH,), PAD)
        padded[:len(ids)] = ids
        return quality, padded, (torch.arange(LENGTH) < len(ids)).long()

    def batch(self, n=16):
        rows = []
        while len(rows) < n:
            prompt = torch.randint(1, VOCAB, (4,), generator=self.gen)
            pair = sorted((self.answer(prompt), self.answer(prompt)), key=lambda row: row[0], reverse=True)
            if pair[0][0] > pair[1][0]:
                rows.append(pair)
        return {f"{key}_{name}": torch.stack([row[i][j] for row in rows])
                for i, name in enumerate(("x", "y")) for j, key in ((1, "input_ids"), (2, "attention_mask"))}


class RewardTrainer:
    def __init__(self, model, learning_rate=3e-4, adam_epsilon=1e-8, max_steps=100, logging_steps=10):
        self.model, self.max_steps, self.logging_steps = model, max_steps, logging_steps
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
                                           lr=learning_rate, eps=adam_epsilon)  # CAUSE
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, max_steps)

    def compute_loss(self, inputs):
        rewards_x = self.model(inputs["input_ids_x"], inputs["attention_mask_x"])
        rewards_y = self.model(inputs["input_ids_y"], inputs["attention_mask_y"])
        loss = -F.logsigmoid((rewards_x - rewards_y).float()).mean()
        return loss, (rewards_x > rewards_y).float().mean()

    def train(self, data):
        self.model.train()
        for step in range(1, self.max_steps + 1):
            loss, accuracy = self.compute_loss(data.batch())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            if step % self.logging_steps == 0:
                print({"loss": round(loss.item(), 4), "accuracy": accuracy.item(), "step": step})


model = AutoModelForSequenceClassification.from_pretrained(torch_dtype=torch.float16)
watch(model)
RewardTrainer(model).train(PreferenceData())
MODULES = (model,)
