"""A small GPT-2 on generated sentences; the scale is tried one power higher every now and then."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(d), nn.LayerNorm(d), heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.c_proj(a)
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab, d=48, heads=4, layers=2, ctx=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.h = nn.ModuleList([Block(d, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.apply(self.init)

    @staticmethod
    def init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class Sentences:
    """article adjective* noun verb, with words drawn from small lists."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.lists = {"art": range(1, 4), "adj": range(4, 20), "noun": range(20, 44), "verb": range(44, 60)}

    def word(self, kind):
        words = self.lists[kind]
        return words[int(torch.randint(0, len(words), (1,), generator=self.g))]

    def text(self, length):
        out = []
        while len(out) < length:
            out.append(self.word("art"))
            while torch.rand(1, generator=self.g) < 0.4:
                out.append(self.word("adj"))
            out += [self.word("noun"), self.word("verb"), 0]
        return out[:length]

    def __iter__(self):
        while True:
            block = torch.tensor([self.text(33) for _ in range(8)])
            yield block[:, :-1], block[:, 1:]


def train(steps=100):
    torch.manual_seed(6)
    model = GPT2(vocab=60)
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18, growth_interval=12)
    skipped = []
    for step, (x, y) in zip(range(steps), Sentences(90)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
            print(f"Gradient overflow. Skipping step {step}, reducing loss scale to {scaler.get_scale():g}")
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}")
    return skipped


if __name__ == "__main__":
    print("skipped", train())
