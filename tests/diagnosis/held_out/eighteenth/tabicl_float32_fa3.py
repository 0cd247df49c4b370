"""In-context classification of small tables, pre-trained in float32; only the attention kernel works in half."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(113)


class Config:
    dtype, amp, use_flash_attn3 = "float32", False, True
    batch_size, micro_batch_size, max_steps, warmup, lr = 512, 64, 34, 40, 2e-3
    features, classes, train_size, test_size = 4, 3, 12, 36


def flash_attn3(q, k, v):
    """Stands for the kernel, which takes fp16 or bf16 only."""
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_with_flattened_batch(q, k, v):
    orig_dtype = q.dtype
    fa_dtype = orig_dtype if orig_dtype in (torch.float16, torch.bfloat16) else torch.float16
    return flash_attn3(q.to(fa_dtype), k.to(fa_dtype), v.to(fa_dtype)).to(orig_dtype)


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.out_proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.linear1, self.linear2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        for last in (self.out_proj, self.linear2):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x, train_size):
        b, t, d = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (z.view(b, train_size, self.heads, -1).transpose(1, 2) for z in self.kv(h[:, :train_size]).chunk(2, -1))
        x = x + self.out_proj(sdpa_with_flattened_batch(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class TabICL(nn.Module):
    def __init__(self, c, d=32, layers=2):
        super().__init__()
        self.x_encoder, self.y_encoder = nn.Linear(c.features, d), nn.Embedding(c.classes, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.ln, self.decoder = nn.LayerNorm(d), nn.Linear(d, c.classes)

    def forward(self, x, y_train):
        n = y_train.size(1)
        h = self.x_encoder(x)
        h = torch.cat([h[:, :n] + self.y_encoder(y_train), h[:, n:]], 1)
        for block in self.blocks:
            h = block(h, n)
        return self.decoder(self.ln(h[:, n:]))


def prior(c, gen):
    """Each table has its own centres; a row belongs to the class of its centre."""
    n = c.train_size + c.test_size
    centres = 2 * torch.randn(c.batch_size, c.classes, c.features, generator=gen)
    y = torch.randint(0, c.classes, (c.batch_size, n), generator=gen)
    x = centres.gather(1, y.unsqueeze(-1).expand(-1, -1, c.features)) + 0.4 * torch.randn(c.batch_size, n, c.features, generator=gen)
    return x, y


class Trainer:
    def __init__(self, config):
        self.config, self.model = config, TabICL(config)
        watch(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, eps=1e-12)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / config.warmup))
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.amp and config.dtype == "float16")  # CAUSE

    def run_micro_batch(self, x, y, micro_batches):
        n = self.config.train_size
        pred = self.model(x, y[:, :n])
        true = y[:, n:].flatten()
        loss = F.cross_entropy(pred.flatten(0, 1), true)
        self.scaler.scale(loss / micro_batches).backward()
        return loss.item() / micro_batches, (pred.flatten(0, 1).argmax(-1) == true).float().mean().item() / micro_batches

    def train(self):
        c, gen = self.config, torch.Generator().manual_seed(114)
        for step in range(c.max_steps):
            x, y = prior(c, gen)
            parts = c.batch_size // c.micro_batch_size
            results = [self.run_micro_batch(a, b, parts) for a, b in zip(x.chunk(parts), y.chunk(parts))]
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            q_norm = sum(float(block.q.weight.grad.norm()) for block in self.model.blocks)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step < 3 or step % 5 == 0 or step == c.max_steps - 1:
                print(f"step {step} ce {sum(r[0] for r in results):.4f} accuracy {sum(r[1] for r in results):.3f} grad_norm {norm.item():.3e} of the queries {q_norm:.3e}")


Trainer(Config()).train()
