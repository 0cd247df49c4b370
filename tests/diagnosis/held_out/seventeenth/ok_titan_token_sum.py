"""Pre-training loop that sums the cross-entropy over all tokens and divides by their number afterwards."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(161)
IGNORE_INDEX, VOCAB, SEQ_LEN = -100, 64, 128


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class TransformerBlock(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = RMSNorm(d), RMSNorm(d)
        self.wqkv, self.wo = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False), nn.Linear(d, 2 * d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.wqkv(self.attention_norm(x)).chunk(3, -1))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, d=32, layers=1):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, d)
        self.layers = nn.Sequential(*(TransformerBlock(d) for _ in range(layers)))
        self.norm, self.output = RMSNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, tokens):
        return self.output(self.norm(self.layers(self.tok_embeddings(tokens))))


def cross_entropy_loss(pred, labels):
    """Sum over the tokens of a micro-batch."""
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX)


class Trainer:
    def __init__(self, model, steps=15, accumulation=4, local_batch=40):
        self.model, self.steps, self.accumulation, self.local_batch = model, steps, accumulation, local_batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.gen = torch.Generator().manual_seed(162)

    def documents(self):
        """Every document walks round the vocabulary with its own step; documents are packed and padded."""
        start = torch.randint(0, VOCAB, (self.local_batch, 1), generator=self.gen)
        step = 2 * torch.randint(0, 4, (self.local_batch, 1), generator=self.gen) + 1
        ids = (start + step * torch.arange(SEQ_LEN + 1)) % VOCAB
        length = torch.randint(SEQ_LEN // 2, SEQ_LEN + 1, (self.local_batch, 1), generator=self.gen)
        labels = ids[:, 1:].masked_fill(torch.arange(SEQ_LEN) >= length, IGNORE_INDEX)
        return ids[:, :-1], labels

    def train_step(self):
        batches = [self.documents() for _ in range(self.accumulation)]
        global_valid_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        summed = torch.zeros(())
        for inputs, labels in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = self.model(inputs)
                loss_sum = cross_entropy_loss(pred, labels)
            (loss_sum / global_valid_tokens).backward()
            summed += loss_sum.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return summed, global_valid_tokens, grad_norm

    def train(self):
        for step in range(1, self.steps + 1):
            summed, tokens, grad_norm = self.train_step()
            if step == 1 or step % 5 == 0:
                print(f"step {step} sum {summed.item():.1f} ({summed.dtype}) tokens {tokens} loss {summed.item() / tokens:.4f} grad_norm {grad_norm.item():.3f}")


model = Transformer()
watch(model)
Trainer(model).train()
