import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(23)

N_MELS, SPEAKERS = 20, 12


class StatsPool(nn.Module):
    def forward(self, frames):  # (B, C, T)
        frames = frames.float()
        mu = frames.mean(dim=2)
        sd = (frames - mu.unsqueeze(2)).square().mean(dim=2).sqrt()  # CAUSE
        return torch.cat([mu, sd], dim=1)


class XVector(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.tdnn = nn.ModuleList([
            nn.Conv1d(N_MELS, ch, 3, padding=1),
            nn.Conv1d(ch, ch, 3, dilation=2, padding=2),
            nn.Conv1d(ch, ch, 1),
        ])
        self.bn = nn.ModuleList(nn.BatchNorm1d(ch) for _ in range(3))
        self.pool = StatsPool()
        self.seg = nn.Linear(2 * ch, 24)

    def forward(self, x):
        for conv, bn in zip(self.tdnn, self.bn):
            x = F.leaky_relu(bn(conv(x)), 0.1)
        return self.seg(self.pool(x))


class AMSoftmax(nn.Module):
    def __init__(self, dim, n, margin=0.1, scale=12.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, dim) * 0.1)
        self.margin, self.scale = margin, scale

    def forward(self, emb, spk):
        cos = F.linear(F.normalize(emb.float()), F.normalize(self.weight))
        cos = cos.float() - self.margin * F.one_hot(spk, cos.shape[1])
        return F.cross_entropy(self.scale * cos, spk), cos.argmax(1)


gen = torch.Generator().manual_seed(6)
timbre = torch.randn(SPEAKERS, N_MELS, generator=gen)
# bucketed by the number of voiced frames that the VAD left over
bucket_len = torch.randint(12, 40, (80,), generator=gen)
bucket_len[torch.tensor([26, 51, 63])] = 1


def utterances(n_frames, n=24):
    spk = torch.randint(0, SPEAKERS, (n,), generator=gen)
    x = timbre[spk].unsqueeze(2) + 1.2 * torch.randn(n, N_MELS, n_frames, generator=gen)
    return x, spk


net, criterion = XVector(), AMSoftmax(24, SPEAKERS)
MODULES = [net, criterion]
watch(*MODULES)
opt = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
hits = total = 0

for batch_idx, n_frames in enumerate(bucket_len.tolist()):
    x, spk = utterances(n_frames)
    with torch.autocast("cpu", dtype=torch.float16):
        emb = net(x)
        loss, guess = criterion(emb, spk)
    hits, total = hits + int((guess == spk).sum()), total + len(spk)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if batch_idx % 10 == 9:
        print(f"batch {batch_idx + 1:3d} frames {n_frames:2d} loss {loss.item():.3f} acc {hits / total:.3f} scale {scaler.get_scale():g}")
        hits = total = 0
