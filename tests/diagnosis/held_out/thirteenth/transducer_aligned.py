"""RNN transducer with alignment restriction: emission of a token is allowed only near the frame the aligner gave."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(40)

FRAMES, TOKENS, VOCAB, MELS = 14, 4, 12, 20
LEFT, RIGHT = 11, 4
NEG = float("-inf")


class Utterances:
    """Tokens at increasing frames. Now and then a speaker pauses before the last words."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.voice = torch.randn(VOCAB, MELS, generator=self.gen)

    def _frames(self):
        start = torch.randint(1, 3, (1,), generator=self.gen)
        gaps = torch.randint(2, 4, (TOKENS - 1,), generator=self.gen)
        at = torch.cat([start, start + gaps.cumsum(0)])
        if torch.rand((), generator=self.gen) < 0.004:
            at[2:] += FRAMES - 1 - at[-1]
        return at.clamp(max=FRAMES - 1)

    def batch(self, size=8):
        tokens = torch.randint(1, VOCAB, (size, TOKENS), generator=self.gen)
        at = torch.stack([self._frames() for _ in range(size)])
        mel = 0.4 * torch.randn(size, FRAMES, MELS, generator=self.gen)
        mel.scatter_add_(1, at[..., None].expand(-1, -1, MELS), self.voice[tokens])
        return mel, tokens, at


class Transducer(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(MELS, width), nn.Tanh(), nn.Linear(width, width))
        self.context = nn.Conv1d(width, width, 3, padding=1)
        self.predictor = nn.Embedding(VOCAB, width)
        self.joint = nn.Linear(width, VOCAB)

    def forward(self, mel, tokens):
        e = self.encoder(mel)
        e = e + self.context(e.transpose(1, 2)).transpose(1, 2)
        p = self.predictor(F.pad(tokens, (1, 0)))
        return self.joint(torch.tanh(e[:, :, None] + p[:, None]))


def restricted_loss(logits, tokens, at):
    lp = F.log_softmax(logits.float(), -1)
    blank = lp[..., 0]
    emit = lp[:, :, :-1].gather(3, tokens[:, None, :, None].expand(-1, FRAMES, -1, 1)).squeeze(3)
    frame = torch.arange(FRAMES).view(1, FRAMES, 1)
    allowed = (frame >= at[:, None] - LEFT) & (frame <= at[:, None] + RIGHT)
    emit = emit.masked_fill(~allowed, NEG)
    alpha = {(0, 0): torch.zeros(len(tokens))}
    for t in range(FRAMES):
        for u in range(TOKENS + 1):
            stay = alpha[t - 1, u] + blank[:, t - 1, u] if t else None
            move = alpha[t, u - 1] + emit[:, t, u - 1] if u else None
            if stay is not None and move is not None:
                alpha[t, u] = torch.logaddexp(stay, move)  # CAUSE
            elif (t, u) != (0, 0):
                alpha[t, u] = move if stay is None else stay
    return -(alpha[FRAMES - 1, TOKENS] + blank[:, -1, -1]).mean()


def main(steps=80):
    corpus = Utterances(seed=9)
    model = Transducer()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=600)
    for step in range(steps):
        mel, tokens, at = corpus.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(mel, tokens)
        loss = restricted_loss(logits, tokens, at)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            print(f"{step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
