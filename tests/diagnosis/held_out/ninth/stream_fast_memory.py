"""Streaming keyword tagger with a fast-weight memory that lives on from chunk to chunk."""
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


@dataclass
class Cfg:
    lanes: int = 8
    chunk: int = 16
    mel: int = 20
    dk: int = 24
    dv: int = 32
    tags: int = 7
    chunks: int = 60
    decay: float = 0.9


class FastWeightTagger(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.kv = nn.Linear(c.mel, c.dk + c.dv)
        self.q = nn.Linear(c.mel, c.dk)
        self.local = nn.Conv1d(c.mel, c.dv, 3, padding=1)
        self.head = nn.Sequential(nn.LayerNorm(c.dv), nn.Linear(c.dv, c.tags))

    def forward(self, frames, memory):
        k, v = self.kv(frames).split([self.c.dk, self.c.dv], dim=-1)
        k = F.relu(k)
        q = F.softmax(self.q(frames), dim=-1)
        recalled = torch.einsum("btk,bkv->btv", q, memory)  # CAUSE
        local = self.local(frames.transpose(1, 2)).transpose(1, 2)
        logits = self.head(local + recalled)
        wrote = torch.einsum("btk,btv->bkv", k, v)  # CAUSE
        return logits, self.c.decay * memory + wrote


class Microphone:
    def __init__(self, c, seed):
        self.c, self.g, self.n = c, torch.Generator().manual_seed(seed), 0
        self.proto = torch.randn(c.tags, c.mel, generator=self.g)

    def __next__(self):
        c = self.c
        tag = torch.randint(0, c.tags, (c.lanes, c.chunk), generator=self.g)
        x = self.proto[tag] + 0.8 * torch.randn(c.lanes, c.chunk, c.mel, generator=self.g)
        self.n += 1
        if self.n == 34:
            x[5, 3:12] *= 260.0         # somebody taps the microphone
        return x, tag


def train(model, c):
    mic = Microphone(c, 13)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    memory = torch.zeros(c.lanes, c.dk, c.dv)
    watch(*MODULES)
    for step in range(1, c.chunks + 1):
        frames, tag = next(mic)
        with torch.autocast("cpu", dtype=torch.float16):
            logits, memory = model(frames, memory)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tag.flatten())
        memory = memory.detach()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0:
            print(step, f"{loss.item():.4f}", f"|memory| {memory.abs().max().item():.4g}")


torch.manual_seed(0)
torch.set_num_threads(1)
cfg = Cfg()
tagger = FastWeightTagger(cfg)
MODULES = [tagger]
train(tagger, cfg)
