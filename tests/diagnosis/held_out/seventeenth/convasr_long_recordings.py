"""Convolutional CTC recogniser of tone alphabets; trained on short cuts, validated on whole recordings with a half model."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(121)
MELS, LETTERS = 16, 6


def temporal_mask(x, lengths):
    return (torch.arange(x.size(-1)) < lengths.unsqueeze(-1)).unsqueeze(1).to(x.dtype)


class MaskedInstanceNorm1d(nn.Module):
    """Each mel band of a recording gets mean 0 and deviation 1 over its frames."""

    def __init__(self, eps=1e-3):
        super().__init__()
        self.eps = eps

    def forward(self, x, mask):
        frames = mask.int().sum(-1, keepdim=True)
        mean = (x * mask).sum(-1, keepdim=True) / frames  # CAUSE
        zero_mean_masked = mask * (x - mean)
        std = ((zero_mean_masked * zero_mean_masked).sum(-1, keepdim=True) / frames + self.eps).sqrt()
        return zero_mean_masked / std


class JasperNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.normalize_features = MaskedInstanceNorm1d()
        self.prologue = nn.Sequential(nn.Conv1d(MELS, width, 9, 4, 4), nn.ReLU())
        self.backbone = nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU())
        self.decoder = nn.Conv1d(width, LETTERS + 1, 1)

    def forward(self, x, xlen):
        x = self.normalize_features(x, temporal_mask(x, xlen))  # CAUSE
        logits = self.decoder(self.backbone(self.prologue(x)))
        return logits.permute(2, 0, 1).float().log_softmax(-1), (xlen + 3) // 4


def recordings(gen, n, letters):
    """Log-mel frames around -9; a letter is 12 frames with two loud bands, then 8 frames of silence."""
    y = torch.randint(1, LETTERS + 1, (n, letters), generator=gen)
    x = -9 + 0.5 * torch.randn(n, MELS, letters * 20, generator=gen)
    for i in range(n):
        for k, letter in enumerate(y[i].tolist()):
            x[i, 2 * letter:2 * letter + 2, 20 * k:20 * k + 12] += 4.0
    xlen = torch.full((n,), letters * 20)
    return x, xlen, y


def greedy(log_probs, length):
    best = log_probs[:length].argmax(-1)
    keep = torch.cat([torch.tensor([True]), best[1:] != best[:-1]]) & (best != 0)
    return best[keep].tolist()


@torch.no_grad()
def validate(model):
    """Half a minute and whole recordings, --fp16 as in transcribe.py."""
    model = copy.deepcopy(model).eval().half()
    for name, letters in (("cuts", 20), ("recordings", 420)):
        x, xlen, y = recordings(torch.Generator().manual_seed(123), 2, letters)
        log_probs, olen = model(x.half(), xlen)
        loss = F.ctc_loss(log_probs, y, olen, torch.full((2,), letters))
        hyp = [greedy(log_probs[:, i], olen[i]) for i in range(2)]
        right = sum(h == r for i in range(2) for h, r in zip(hyp[i], y[i].tolist()) if len(hyp[i]) == letters)
        yield f"{name}: loss {loss.item():.3f} letters {sum(map(len, hyp))}/{2 * letters} right {right}"


def main(iterations=100):
    model = JasperNet()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    gen = torch.Generator().manual_seed(122)
    for iteration in range(iterations):
        letters = int(torch.randint(3, 8, (1,), generator=gen))
        x, xlen, y = recordings(gen, 8, letters)
        with torch.autocast("cpu", dtype=torch.float16):
            log_probs, olen = model(x, xlen)
            loss = F.ctc_loss(log_probs, y, olen, torch.full((8,), letters))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if iteration % 25 == 24:
            print(f"iteration {iteration} loss {loss.item():.3f} | " + " | ".join(validate(model)))


if __name__ == "__main__":
    main()
