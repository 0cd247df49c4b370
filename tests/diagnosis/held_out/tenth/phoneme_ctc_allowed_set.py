"""Phoneme recognition with CTC; each language only uses part of the phoneme inventory."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(30)
PHONES, FEATS = 24, 20


class Acoustic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.front = nn.Conv1d(FEATS, hidden, 5, stride=2, padding=2)
        self.ctx = nn.Conv1d(hidden, hidden, 7, padding=3, groups=4)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(hidden, PHONES)

    def forward(self, feats):
        x = torch.relu(self.front(feats.transpose(1, 2)))
        x = x + torch.relu(self.ctx(x))
        return self.out(self.drop(self.norm(x.transpose(1, 2))))


class CtcObjective(nn.Module):
    def __init__(self, allowed):
        super().__init__()
        self.register_buffer("blocked", ~allowed)
        self.ctc = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)

    def forward(self, logits, lang, targets, in_len, tgt_len):
        logits = logits.float().masked_fill(self.blocked[lang].unsqueeze(1), float("-inf"))
        logp = logits.log_softmax(-1).clamp(min=-80.0).transpose(0, 1)
        return self.ctc(logp, targets, in_len, tgt_len) / tgt_len.sum()


gen = torch.Generator().manual_seed(90)
allowed = torch.zeros(2, PHONES, dtype=torch.bool)
allowed[0, :16] = True
allowed[1, [0] + list(range(10, 24))] = True
pattern = torch.randn(PHONES, FEATS, generator=gen)


def batch(n=8, phones=6, stretch=4):
    lang = torch.randint(0, 2, (n,), generator=gen)
    tgt = torch.stack([torch.where(allowed[l])[0][1:][torch.randperm(14, generator=gen)[:phones]] for l in lang])
    frames = pattern[tgt].repeat_interleave(stretch, dim=1)
    frames = frames + 0.3 * torch.randn(frames.shape, generator=gen)
    return frames, lang, tgt, torch.full((n,), phones * stretch // 2), torch.full((n,), phones)


acoustic, objective = Acoustic(), CtcObjective(allowed)
MODULES = [acoustic, objective]
watch(*MODULES)
opt = torch.optim.AdamW(acoustic.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, total_steps=100)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 17, growth_interval=12)
for it in range(90):
    feats, lang, tgt, in_len, tgt_len = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = acoustic(feats)
    loss = objective(logits, lang, tgt, in_len, tgt_len)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(acoustic.parameters(), 5.0)
    scaler.step(opt)
    old = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= old:
        sched.step()
    if it % 15 == 0:
        print(f"{it} ctc {loss.item():.3f} scale {scaler.get_scale():g}")
