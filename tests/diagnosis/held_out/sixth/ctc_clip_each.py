import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(43)
SYMBOLS = 5


class Acoustic(nn.Module):
    def __init__(self, mel=10, ch=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(mel, ch, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv1d(ch, ch, 3, padding=1, groups=4), nn.ReLU(),
            nn.Conv1d(ch, SYMBOLS + 1, 1))

    def forward(self, x):
        return self.net(x).permute(2, 0, 1)


class Trainer:
    def __init__(self, model, accumulate=3, clip=5.0):
        self.model, self.accumulate, self.clip = model, accumulate, clip
        self.opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        self.ctc = nn.CTCLoss(zero_infinity=True)
        self.history = []

    def micro_step(self, x, y, ylen):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(x)
        lp = logits.float().log_softmax(-1)
        xlen = torch.full((x.size(0),), lp.size(0), dtype=torch.long)
        loss = self.ctc(lp, y, xlen, ylen) / self.accumulate
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)  # CAUSE
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.update()  # CAUSE
        return loss.item()

    def train_step(self, batches):
        self.opt.zero_grad()
        self.history.append(sum(self.micro_step(*b) for b in batches))
        self.scaler.step(self.opt)
        self.scaler.update()


gen = torch.Generator().manual_seed(9)
templates = torch.randn(SYMBOLS + 1, 10, generator=gen)


def utterances(n=8, frames=40):
    y = torch.randint(1, SYMBOLS + 1, (n, 5), generator=gen)
    ylen = torch.randint(3, 6, (n,), generator=gen)
    x = 0.3 * torch.randn(n, 10, frames, generator=gen)
    for i in range(n):
        for j in range(int(ylen[i])):
            x[i, :, 8 * j + 1:8 * j + 6] += templates[y[i, j]][:, None]
    return x, y, ylen


model = Acoustic()
MODULES = [model]
trainer = Trainer(model)
watch(*MODULES)
for step in range(50):
    trainer.train_step([utterances() for _ in range(3)])
    if step % 10 == 0:
        print(step, round(trainer.history[-1], 4), trainer.scaler.get_scale())
