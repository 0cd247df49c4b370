from dataclasses import dataclass

import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


@dataclass
class Config:
    dim: int = 12
    hidden: int = 64
    blocks: int = 4
    batch: int = 64
    steps: int = 90
    lr: float = 1e-3
    log_scale_cap: float = 9.0


class AffineCoupling(nn.Module):
    def __init__(self, cfg, flip):
        super().__init__()
        half = cfg.dim // 2
        self.flip, self.cap = flip, cfg.log_scale_cap
        self.body = nn.Sequential(nn.Linear(half, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, cfg.hidden), nn.ReLU())
        self.to_shift = nn.Linear(cfg.hidden, half)
        self.to_scale = nn.Linear(cfg.hidden, half)
        for lin in (self.to_shift, self.to_scale):
            nn.init.normal_(lin.weight, std=0.05)
            nn.init.zeros_(lin.bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        if self.flip:
            a, b = b, a
        h = self.body(a)  # CAUSE
        log_s, t = self.cap * torch.tanh(self.to_scale(h) / self.cap), self.to_shift(h)
        b = b * log_s.exp() + t
        out = torch.cat([b, a] if self.flip else [a, b], -1)
        return out, log_s.float().sum(-1)


class Flow(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.ModuleList(AffineCoupling(cfg, flip=bool(i % 2)) for i in range(cfg.blocks))

    def nll(self, x):
        logdet = torch.zeros(x.size(0))
        for blk in self.blocks:
            x, ld = blk(x)
            logdet = logdet + ld
        x = x.float()
        return (0.5 * x.pow(2).sum(-1) - logdet).clamp(max=1e4).mean()


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.flow = Flow(cfg)
        self.opt = torch.optim.Adam(self.flow.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.gen = torch.Generator().manual_seed(6)
        self.mix = torch.randn(cfg.dim, cfg.dim, generator=self.gen) / cfg.dim ** 0.5

    def sample_rows(self):
        z = torch.randn(self.cfg.batch, self.cfg.dim, generator=self.gen)
        # now and then a sensor reports in the wrong unit
        glitch = torch.rand(self.cfg.batch, 1, generator=self.gen) < 2.5e-4
        return torch.where(glitch, 200.0, 1.0) * (z @ self.mix)

    def fit(self):
        for step in range(1, self.cfg.steps + 1):
            rows = self.sample_rows()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.flow.nll(rows)
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.flow.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            if step % 15 == 0:
                print(f"step {step}: nll {loss.item():.3f}")


torch.set_num_threads(1)
torch.manual_seed(1)
trainer = Trainer(Config())
MODULES = [trainer.flow]
watch(*MODULES)
trainer.fit()
