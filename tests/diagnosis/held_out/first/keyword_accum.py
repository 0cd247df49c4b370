import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class KeywordSpotter(nn.Module):
    def __init__(self, n_mels=20, classes=8):
        super().__init__()
        self.dw = nn.Conv1d(n_mels, n_mels, 5, padding=2, groups=n_mels)
        self.pw = nn.Conv1d(n_mels, 48, 1)
        self.bn = nn.BatchNorm1d(48)
        self.gru = nn.GRU(48, 32, batch_first=True)
        self.att = nn.Linear(32, 1)
        self.cls = nn.Linear(32, classes)

    def forward(self, mel):
        h = F.relu(self.bn(self.pw(self.dw(mel))))
        h, _ = self.gru(h.transpose(1, 2))
        w = self.att(h).float().softmax(1)
        return self.cls((w * h).sum(1))


class Accumulator:
    """micro-batches of 8, effective batch 32"""

    def __init__(self, model, lr=0.05, accum=4, max_norm=1.0):
        self.model, self.accum, self.max_norm = model, accum, max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=500)

    def run(self, batches):
        for i, (mel, y) in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(self.model(mel).float(), y) / self.accum
            self.scaler.scale(loss).backward()
            if i % self.accum == 0:  # CAUSE
                self.scaler.unscale_(self.optimizer)  # CAUSE
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            if (i + 1) % self.accum == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)
            if (i + 1) % 40 == 0:
                wn = sum(p.detach().square().sum() for p in self.model.parameters()).sqrt()
                print(f"micro {i + 1} ce {loss.item() * self.accum:.4f} |w| {wn:.2f}")


def clips(gen, n, classes=8):
    bank = torch.randn(classes, 20, 30, generator=gen)
    for _ in range(n):
        y = torch.randint(0, classes, (8,), generator=gen)
        yield bank[y] + 1.0 * torch.randn(8, 20, 30, generator=gen), y


torch.manual_seed(26)
torch.set_num_threads(1)
spotter = KeywordSpotter()
MODULES = [spotter]
acc = Accumulator(spotter)
watch(*MODULES)
acc.run(clips(torch.Generator().manual_seed(66), 200))
