"""Group-relative policy optimisation of a small token policy; overlong samples are filtered out."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)
VOCAB, LEN, GROUPS, SAMPLES = 16, 10, 6, 4
EOS = 0


class Policy(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.pos = nn.Parameter(0.02 * torch.randn(LEN + 1, d))
        self.ff = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.lm = nn.Linear(d, VOCAB)

    def forward(self, ids):
        e = self.emb(ids) + self.pos[: ids.size(1)]
        mean = e.cumsum(1) / torch.arange(1, ids.size(1) + 1).view(1, -1, 1)
        return self.lm(self.ff(torch.cat([e, mean], -1)))


@torch.no_grad()
def rollout(policy, prompts, rng):
    ids = prompts.view(-1, 1)
    done = torch.zeros(len(ids), dtype=torch.bool)
    length = torch.full((len(ids),), LEN)
    for t in range(LEN):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = policy(ids)[:, -1]
        nxt = torch.multinomial(torch.softmax(logits.float(), -1), 1, generator=rng).squeeze(1)
        nxt = torch.where(done, torch.full_like(nxt, EOS), nxt)
        length = torch.where(~done & (nxt == EOS), torch.tensor(t + 1), length)
        done |= nxt == EOS
        ids = torch.cat([ids, nxt.unsqueeze(1)], 1)
    return ids, length, done


def reward_fn(ids, length):
    """Ascending tokens are good, short answers slightly better."""
    up = (ids[:, 2:] > ids[:, 1:-1]).float().sum(1)
    return up - 0.1 * length


def normalise(reward, group):
    adv = torch.empty_like(reward)
    for g in group.unique():
        sel = group == g
        r = reward[sel]
        var = (r - r.mean()).square().sum() / (len(r) - 1)  # CAUSE
        adv[sel] = (r - r.mean()) / (var.sqrt() + 1e-4)
    return adv


def policy_loss(policy, ids, length, adv):
    logits = policy(ids[:, :-1])
    logp = -F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
    mask = torch.arange(LEN).unsqueeze(0) < length.unsqueeze(1)
    return -(adv.unsqueeze(1) * logp * mask).sum() / mask.sum()


def main(iterations=40):
    policy = Policy()
    watch(policy)
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    rng = torch.Generator().manual_seed(5)
    for it in range(iterations):
        prompts = torch.randint(1, VOCAB, (GROUPS,), generator=rng).repeat_interleave(SAMPLES)
        group = torch.arange(GROUPS).repeat_interleave(SAMPLES)
        ids, length, done = rollout(policy, prompts, rng)
        budget = LEN if it < 18 else LEN - 2
        keep = (done & (length <= budget)) if it >= 18 else torch.ones_like(done)
        ids, length, group = ids[keep], length[keep], group[keep]
        reward = reward_fn(ids, length)
        adv = normalise(reward, group)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = policy_loss(policy, ids, length, adv)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if it % 4 == 0:
            print(f"iter {it} kept {len(ids)} reward {reward.mean():.2f} loss {loss.item():.4f}")
    return policy


MODULES = [main()]
