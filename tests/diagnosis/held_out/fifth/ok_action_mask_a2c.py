import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(51)


class ActorCritic(nn.Module):
    def __init__(self, obs=14, n_act=9):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.Mish(), nn.Linear(48, 48), nn.Mish())
        self.pi, self.v = nn.Linear(48, n_act), nn.Linear(48, 1)

    def forward(self, obs, legal):
        h = self.body(obs)
        logits = self.pi(h).masked_fill(~legal, float("-inf"))
        return logits, self.v(h).squeeze(-1)


def losses(logits, value, act, ret, legal):
    logp = logits.float().log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(~legal, 0.0)).sum(-1)
    adv = ret - value.float()
    adv_n = adv.detach()
    if adv_n.numel() > 1:
        adv_n = (adv_n - adv_n.mean()) / (adv_n.std() + 1e-5)
    pg = -(logp.gather(1, act[:, None]).squeeze(1) * adv_n).mean()
    return pg + 0.5 * adv.pow(2).mean() - 0.01 * entropy.mean()


agent = ActorCritic()
MODULES = [agent]
watch(*MODULES)
g = torch.Generator().manual_seed(510)
W = torch.randn(14, 9, generator=g)
opt = torch.optim.RMSprop(agent.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
returns = []
for update in range(80):
    n = 1 if update % 16 == 9 else 32
    obs = torch.randn(n, 14, generator=g)
    legal = torch.rand(n, 9, generator=g) < 0.5
    legal[torch.arange(n), torch.randint(0, 9, (n,), generator=g)] = True
    legal[0] = False
    legal[0, 3] = True                       # forced move
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        prob = agent(obs, legal)[0].float().softmax(-1)
    act = torch.multinomial(prob, 1, generator=g).squeeze(1)
    ret = (obs @ W).gather(1, act[:, None]).squeeze(1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, value = agent(obs, legal)
        loss = losses(logits, value, act, ret, legal)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    returns.append(ret.mean().item())
print("return", sum(returns[:10]) / 10, "->", sum(returns[-10:]) / 10)
