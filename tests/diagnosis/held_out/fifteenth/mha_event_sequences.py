"""Next-event prediction on raw sensor readings with torch.nn.MultiheadAttention."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn_map = None

    def forward(self, src, key_padding_mask):
        out, weights = self.self_attn(src, src, src, key_padding_mask=key_padding_mask, need_weights=True)  # CAUSE
        self.attn_map = weights.detach()
        src = self.norm1(src + out)
        return self.norm2(src + self.linear2(F.relu(self.linear1(src))))


class EventModel(nn.Module):
    def __init__(self, features=6, dim=64, heads=4, layers=2, kinds=5):
        super().__init__()
        self.value = nn.Linear(features, dim)
        self.position = nn.Parameter(0.1 * torch.randn(24, dim))
        self.layers = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, kinds)

    def forward(self, readings, padding):
        x = self.value(readings) + self.position[: readings.shape[1]]
        for layer in self.layers:
            x = layer(x, padding)
        keep = (~padding).unsqueeze(-1).float()
        return self.head((x * keep).sum(1) / keep.sum(1))


class Stations:
    """Flow rates in litres per hour: most stations are small, a few belong to trunk lines."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.pattern = torch.randn(5, 24, 6, generator=self.gen)

    def batch(self, step, n=16):
        kind = torch.randint(0, 5, (n,), generator=self.gen)
        length = torch.randint(12, 25, (n,), generator=self.gen)
        level = 4 + 6 * torch.rand(n, 1, 1, generator=self.gen)
        x = level * (1.0 + self.pattern[kind] + 0.3 * torch.randn(n, 24, 6, generator=self.gen))
        if step >= 38 and step % 6 == 2:
            x[0] = x[0] * 90  # a trunk line
        padding = torch.arange(24)[None] >= length[:, None]
        return x.masked_fill(padding.unsqueeze(-1), 0.0), padding, kind


def evaluate(model, data, amp_dtype):
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=amp_dtype):
        x, pad, y = data.batch(0, 64)
        acc = (model(x, pad).argmax(-1) == y).float().mean()
    model.train()
    return acc.item()


def main(steps=80):
    train, valid = Stations(1), Stations(1)
    model = EventModel()
    watch(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11, growth_interval=1000)
    for step in range(steps):
        x, pad, y = train.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x, pad)
            loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 9:
            print(f"{step + 1:3d} loss {loss.item():.3f} acc {evaluate(model, valid, torch.float16):.2f} "
                  f"scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
