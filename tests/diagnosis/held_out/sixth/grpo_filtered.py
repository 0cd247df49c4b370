import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(7)
VOCAB, EOS, MAXLEN, GROUP = 12, 0, 20, 6


class TinyPolicy(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.cell_i, self.cell_h = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d)
        self.head = nn.Linear(d, VOCAB)

    def step(self, tok, h):
        i, g = self.cell_i(self.emb(tok)).chunk(3, -1), self.cell_h(h).chunk(3, -1)
        r, z = torch.sigmoid(i[0] + g[0]), torch.sigmoid(i[1] + g[1])
        n = torch.tanh(i[2] + r * g[2])
        h = (1 - z) * n + z * h
        return self.head(h).float(), h

    def logprobs(self, prompt, seq):
        h = torch.zeros(len(seq), 32)
        tok, out = prompt, []
        for t in range(seq.size(1)):
            logits, h = self.step(tok, h)
            out.append(logits.log_softmax(-1).gather(1, seq[:, t:t + 1]))
            tok = seq[:, t]
        return torch.cat(out, 1)


@torch.no_grad()
def rollout(policy, prompt, gen):
    h, tok, seq = torch.zeros(len(prompt), 32), prompt, []
    for _ in range(MAXLEN):
        logits, h = policy.step(tok, h)
        tok = torch.multinomial(logits.softmax(-1), 1, generator=gen).squeeze(1)
        seq.append(tok)
    return torch.stack(seq, 1)


def reward(seq, prompt):
    ended = (seq == EOS).float().cumsum(1)
    live = (ended == 0).float()
    return ((seq == prompt[:, None]).float() * live).sum(1) - 0.05 * live.sum(1)


def group_advantages(rewards, group_id, keep):
    adv = torch.zeros_like(rewards)
    for g in group_id.unique():
        sel = (group_id == g) & keep
        if sel.any():
            r = rewards[sel]
            adv[sel] = (r - r.mean()) / (r.std() + 1e-4)  # CAUSE
    return adv


policy = TinyPolicy()
MODULES = [policy]
gen = torch.Generator().manual_seed(41)
opt = torch.optim.AdamW(policy.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
watch(*MODULES)

for it in range(50):
    prompts = torch.randint(1, VOCAB, (5,), generator=gen).repeat_interleave(GROUP)
    gid = torch.arange(5).repeat_interleave(GROUP)
    with torch.autocast("cpu", dtype=torch.float16):
        seq = rollout(policy, prompts, gen)
    done = (seq == EOS).any(1)                      # truncated answers are filtered out
    mask = ((seq == EOS).float().cumsum(1) <= 1).float() * done[:, None].float()
    adv = group_advantages(reward(seq, prompts), gid, done)
    with torch.autocast("cpu", dtype=torch.float16):
        lp = policy.logprobs(prompts, seq)
        ratio = (lp - lp.detach()).exp()
        loss = -(ratio * adv[:, None] * mask).sum() / mask.sum().clamp(min=1)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0:
        print(it, reward(seq, prompts).mean().item(), done.float().mean().item())
