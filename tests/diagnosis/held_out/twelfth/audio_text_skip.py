"""Audio-caption contrastive training in bf16: accumulation, checkpointing, fp32 EMA; thin batches are left out."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(57)
CONCEPTS = 10


class AudioTower(nn.Module):
    def __init__(self, bands=24, d=48):
        super().__init__()
        self.inp = nn.Conv1d(bands, d, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(d, d, 3, padding=1), nn.GroupNorm(4, d), nn.GELU())
                                    for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.mean(-1)


class TextTower(nn.Module):
    def __init__(self, vocab=40, d=48):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, d, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))

    def forward(self, ids):
        return self.mlp(self.bag(ids))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.audio, self.text = AudioTower(), TextTower()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, mel, ids):
        a = F.normalize(self.audio(mel).float(), dim=-1)
        t = F.normalize(self.text(ids).float(), dim=-1)
        logits = self.temperature.clamp(max=4.6).exp() * a @ t.t()
        labels = torch.arange(len(logits))
        return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))


class Stream:
    def __init__(self, seed=61):
        self.g = torch.Generator().manual_seed(seed)
        self.sound = torch.randn(CONCEPTS, 24, 1, generator=self.g)

    def __call__(self, n=10):
        concept = torch.randperm(CONCEPTS, generator=self.g)[:n]
        mel = self.sound[concept] + 0.5 * torch.randn(n, 24, 16, generator=self.g)
        ids = concept.unsqueeze(1) * 4 + torch.randint(0, 4, (n, 5), generator=self.g)
        downloaded = torch.rand(n, generator=self.g) < 0.55
        return mel[downloaded], ids[downloaded]


model = Pair()
ema = copy.deepcopy(model).requires_grad_(False)
MODULES = [model]
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
stream, skipped, micro, running = Stream(), 0, 0, 0.0
for tick in range(160):
    mel, ids = stream()
    if len(mel) < 4:  # too few clips still online
        skipped += 1
        continue
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(mel, ids) / 2
    loss.backward()
    running += loss.item()
    micro += 1
    if micro % 2:
        continue
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 0.02)
    if micro % 20 == 0:
        print(f"tick {tick} updates {micro // 2} loss {running / 10:.4f} left out {skipped}")
        running = 0.0
