"""Which appliance is running? Linear attention over half-hour windows of a house's power meter."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)


class ActivationFeatureMap(nn.Module):
    def forward(self, x):
        return F.elu(x) + 1


class LinearAttention(nn.Module):
    """softmax(QK')V replaced by phi(Q) (phi(K)' V), not causal."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.feature_map, self.eps = ActivationFeatureMap(), eps

    def forward(self, queries, keys, values, key_lengths):
        q, k = self.feature_map(queries), self.feature_map(keys)
        k = k * key_lengths[:, :, None, None]
        kv = torch.einsum("nshd,nshm->nhmd", k, values)  # CAUSE
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + self.eps)  # CAUSE
        v = torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z)  # CAUSE
        return v.contiguous()


class AttentionLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.inner = heads, LinearAttention()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, lengths):
        n, s, d = x.shape
        q, k, v = (f(x).view(n, s, self.heads, -1) for f in (self.query, self.key, self.value))
        return self.out(self.inner(q, k, v, lengths).view(n, s, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.attention = AttentionLayer(d, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, lengths):
        x = self.norm1(x + self.attention(x, lengths))
        return self.norm2(x + self.ff(x))


class ApplianceNet(nn.Module):
    def __init__(self, d=24, classes=4):
        super().__init__()
        self.embed = nn.Conv1d(1, d, 9, padding=4)
        self.layers = nn.ModuleList(EncoderLayer(d) for _ in range(2))
        self.head = nn.Linear(d, classes)

    def forward(self, power, lengths):
        x = self.embed(power.unsqueeze(1)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, lengths)
        pooled = (x * lengths.unsqueeze(2)).mean(1)
        return self.head(pooled)


def windows(gen, base_load, n=6, length=360):
    """Power in units of 100 W; an appliance of one of four sizes and rhythms is on for part of the window."""
    kind = torch.randint(0, 4, (n,), generator=gen)
    power = base_load + 0.2 * torch.rand(n, length, generator=gen)
    time = torch.arange(length)
    for i, c in enumerate(kind.tolist()):
        start = torch.randint(0, length // 2, (1,), generator=gen).item()
        on = (time >= start) & (time < start + 160) & ((time // (10 * (c + 1))) % 2 == 0)
        power[i] += on * (1.0 + 0.8 * c)
    lengths = torch.ones(n, length)
    return power, lengths, kind


def main(steps=60):
    model = ApplianceNet()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    gen = torch.Generator().manual_seed(9)
    for step in range(steps):
        base_load = 0.5 + (step % 20) * 0.1  # houses are read from the smallest to the largest consumer
        power, lengths, kind = windows(gen, base_load)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(power, lengths)
            loss = F.cross_entropy(logits, kind)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0 or step == steps - 1:
            print(f"{step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")


main()
