import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class SiameseGRU(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids):
        h = torch.zeros(len(ids), 32)
        for e in self.emb(ids).unbind(1):
            h = self.cell(e, h)
        return F.normalize(self.proj(h).float(), dim=-1)


class Loop:
    accumulate = 4

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.global_step = 0

    def training_step(self, batch):
        a, b = batch
        with torch.autocast("cpu", dtype=torch.float16):
            za, zb = self.model(a), self.model(b)
        logits = za @ zb.t() / 0.2
        return F.cross_entropy(logits, torch.arange(len(a)))

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.global_step += 1

    def on_window_start(self):
        self.optimizer.zero_grad(set_to_none=False)

    def fit(self, batches):
        for i, batch in enumerate(batches):
            loss = self.training_step(batch)
            self.scaler.scale(loss / self.accumulate).backward()
            if (i + 1) % self.accumulate == 0:
                self.on_window_start()  # CAUSE
                self.optimizer_step()
                if self.global_step % 8 == 0:
                    print(self.global_step, f"{loss.item():.4f}")


def names(n_batches, size=16, length=6, seed=88):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n_batches):
        a = torch.randint(0, 30, (size, length), generator=g)
        typo = torch.rand(a.shape, generator=g) < 0.1
        yield a, torch.where(typo, torch.randint(0, 30, a.shape, generator=g), a)


torch.set_num_threads(1)
torch.manual_seed(88)
model = SiameseGRU()
MODULES = [model]
watch(*MODULES)
Loop(model).fit(names(160))
