import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
VOCAB, EOS, MAX_NEW, GROUP = 16, 15, 10, 4


class TinyPolicy(nn.Module):
    def __init__(self, dim=32, max_len=16):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.mix = nn.Linear(2 * dim, 64)
        self.out = nn.Linear(64, VOCAB)

    def forward(self, ids):
        h = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        ctx = h.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.out(torch.tanh(self.mix(torch.cat([h, ctx], -1))))


@torch.no_grad()
def generate(policy, prompts, gen):
    ids = prompts.repeat_interleave(GROUP, 0)
    alive = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(MAX_NEW):
        logits = policy(ids)[:, -1].float()
        noise = torch.rand(logits.shape, generator=gen).clamp_(1e-6, 1 - 1e-6)
        nxt = (logits - torch.log(-torch.log(noise))).argmax(-1)
        nxt = torch.where(alive, nxt, torch.full_like(nxt, EOS))
        alive = alive & (nxt != EOS)
        ids = torch.cat([ids, nxt[:, None]], 1)
    return ids, ~alive


def reward(ids, plen):
    return (ids[:, plen:] == ids[:, :1]).float().mean(1)


def group_advantages(r, group_id):
    adv = torch.empty_like(r)
    for gid in group_id.unique():
        sel = group_id == gid
        adv[sel] = (r[sel] - r[sel].mean()) / (r[sel].std() + 1e-4)  # CAUSE
    return adv


def logps(model, ids, plen):
    lp = F.log_softmax(model(ids[:, :-1]).float(), -1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, plen - 1:]


torch.manual_seed(5)
policy = TinyPolicy()
ref = copy.deepcopy(policy).requires_grad_(False)
MODULES = [policy, ref]


def main(steps=40, beta=0.02):
    watch(*MODULES)
    gen = torch.Generator().manual_seed(51)
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        prompts = torch.randint(0, VOCAB - 1, (8, 3), generator=gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ids, finished = generate(policy, prompts, gen)
        group_id = torch.arange(8).repeat_interleave(GROUP)
        r = reward(ids, 3)
        counts = torch.bincount(group_id[finished], minlength=8)
        # answers that ran into the length limit are not scored
        keep = finished if step > 12 else torch.ones_like(finished)
        ids, group_id, r = ids[keep], group_id[keep], r[keep]
        adv = group_advantages(r, group_id)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lp = logps(policy, ids, 3)
            with torch.no_grad():
                lp_ref = logps(ref, ids, 3)
        ratio = torch.exp(lp - lp.detach())
        kl = torch.exp(lp_ref - lp) - (lp_ref - lp) - 1
        loss = -(ratio * adv[:, None] - beta * kl).mean()
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        if step % 4 == 0:
            print(f"{step} reward {r.mean():.3f} kl {kl.mean().item():.4f} grad {gn:.3f} finished {int(counts.sum())}/32")


main()
