import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(31)


class PolicyValue(nn.Module):
    def __init__(self, obs=8, actions=6, width=48):
        super().__init__()
        self.core = nn.GRUCell(obs, width)
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)

    def forward(self, x, h):
        h = self.core(x, h.to(x.dtype))
        return self.pi(h), self.v(h).squeeze(-1), h


def gae(rew, val, last, gamma=0.97, lam=0.9):
    adv, run = [], torch.zeros_like(last)
    for r, v in zip(reversed(rew), reversed(val)):
        delta = r + gamma * last - v
        run = delta + gamma * lam * run
        adv.append(run)
        last = v
    return torch.stack(adv[::-1])


class BoardEnv:
    def __init__(self, n=16, seed=1):
        self.n, self.g = n, torch.Generator().manual_seed(seed)
        self.w = torch.randn(8, 6, generator=self.g)

    def observe(self, phase):
        obs = torch.randn(self.n, 8, generator=self.g)
        legal = torch.ones(self.n, 6, dtype=torch.bool)
        if phase >= 2:                # from the third phase on some moves are not allowed
            legal = torch.rand(self.n, 6, generator=self.g) > 0.15
            legal[:, 0] = True
        return obs, legal

    def reward(self, obs, act):
        return (obs @ self.w).gather(1, act[:, None]).squeeze(1) * 0.3


def entropy(logits):
    logp = F.log_softmax(logits.float(), dim=-1)
    return -(logp.exp() * logp).sum(-1)  # CAUSE


env, net = BoardEnv(), PolicyValue()
MODULES = [net]
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
watch(*MODULES)
for update in range(45):
    h = torch.zeros(env.n, 48)
    lps, ents, vals, rews = [], [], [], []
    with torch.autocast("cpu", dtype=torch.float16):
        for t in range(5):
            obs, legal = env.observe(update // 10)
            logits, v, h = net(obs, h)
            logits = logits.masked_fill(~legal, float("-inf"))
            p = logits.detach().float().softmax(-1)
            act = torch.multinomial(p, 1, generator=env.g).squeeze(1)
            lps.append(F.log_softmax(logits.float(), -1).gather(1, act[:, None]).squeeze(1))
            ents.append(entropy(logits))
            vals.append(v.float())
            rews.append(env.reward(obs, act))
    adv = gae(rews, [v.detach() for v in vals], torch.zeros(env.n))
    target = adv + torch.stack(vals).detach()
    loss = -(torch.stack(lps) * adv).mean() + 0.5 * F.mse_loss(torch.stack(vals), target)
    loss = loss - 0.01 * torch.stack(ents).mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    if update % 15 == 14:
        print(update, torch.stack(rews).mean().item(), loss.item())
