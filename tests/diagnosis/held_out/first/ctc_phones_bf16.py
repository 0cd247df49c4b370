import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(4)
torch.set_num_threads(1)
PHONES = 12


class SpecAugment(nn.Module):
    def __init__(self, gen, width=4):
        super().__init__()
        self.gen, self.width = gen, width

    def forward(self, x):
        if not self.training:
            return x
        s = int(torch.randint(0, x.size(1) - self.width, (1,), generator=self.gen))
        x = x.clone()
        x[:, s:s + self.width] = 0
        return x


class AcousticModel(nn.Module):
    def __init__(self, gen, feats=16, hid=40):
        super().__init__()
        self.aug = SpecAugment(gen)
        self.sub = nn.Conv1d(feats, hid, 3, stride=2, padding=1)
        self.lstm = nn.LSTM(hid, hid, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(2 * hid, PHONES)

    def forward(self, x):
        h = F.relu(self.sub(self.aug(x).transpose(1, 2))).transpose(1, 2)
        h, _ = self.lstm(h)
        return self.out(self.drop(h))


def corpus(gen, templates, b=8):
    feats, lens, ys = [], [], []
    for _ in range(b):
        n = int(torch.randint(2, 6, (1,), generator=gen))
        y = torch.randint(1, PHONES, (n,), generator=gen)
        # fast speakers: sometimes fewer (subsampled) frames than labels
        dur = 1 if torch.rand(1, generator=gen) < 0.08 else 5
        x = templates[y].repeat_interleave(dur, 0)
        feats.append(x + 0.3 * torch.randn(x.shape, generator=gen))
        lens.append((len(x) + 1) // 2)
        ys.append(y)
    return nn.utils.rnn.pad_sequence(feats, batch_first=True), torch.tensor(lens), ys


gen = torch.Generator().manual_seed(29)
templates = torch.randn(PHONES, 16, generator=gen)
net = AcousticModel(gen)
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 10, (10 / (s + 1)) ** 0.5))
watch(*MODULES)

for it in range(1, 101):
    x, xl, ys = corpus(gen, templates)
    yl = torch.tensor([len(y) for y in ys])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    logp = logits.float().log_softmax(-1).transpose(0, 1)
    per_utt = F.ctc_loss(logp, torch.cat(ys), xl, yl, reduction="none", zero_infinity=True)
    usable = per_utt > 0
    loss = (per_utt / yl).sum() / usable.sum().clamp(min=1)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    sched.step()
    if it % 20 == 0:
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            path = net(x).argmax(-1)
        net.train()
        print(it, f"ctc {loss.item():.4f} usable {int(usable.sum())} blanks {(path == 0).float().mean():.2f}")
