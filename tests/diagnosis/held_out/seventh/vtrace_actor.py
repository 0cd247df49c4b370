"""Off-policy actor-critic on a corridor; the behaviour policy is stale, importance weights are truncated at one."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

CELLS, ACTIONS, HORIZON, GAMMA = 12, 3, 16, 0.95

class ActorCritic(nn.Module):
    def __init__(self, hid=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(CELLS, hid), nn.ELU(), nn.Linear(hid, hid), nn.ELU())
        self.pi, self.v = nn.Linear(hid, ACTIONS), nn.Linear(hid, 1)

    def forward(self, obs):
        h = self.body(obs)
        return F.log_softmax(self.pi(h), -1), self.v(h).squeeze(-1)

class Corridor:
    def __init__(self, n, gen):
        self.n, self.gen = n, gen

    def rollout(self, policy):
        pos = torch.randint(1, CELLS - 1, (self.n,), generator=self.gen)
        obs, acts, rew, mu, live = [], [], [], [], []
        alive = torch.ones(self.n, dtype=torch.bool)
        for _ in range(HORIZON):
            o = F.one_hot(pos, CELLS).float()
            lp = policy(o)
            a = torch.multinomial(lp.exp(), 1, generator=self.gen).squeeze(1)
            obs.append(o), acts.append(a), mu.append(lp.gather(1, a[:, None]).squeeze(1)), live.append(alive)
            pos = torch.where(alive, (pos + a - 1).clamp(0, CELLS - 1), pos)
            done = alive & (pos == CELLS - 1)
            rew.append(done.float() - 0.01 * alive.float())
            alive = alive & ~done
        return [torch.stack(z) for z in (obs, acts, rew, mu, live)]

@torch.no_grad()
def vtrace(logp, mu, rew, value, live):
    ratio = torch.exp(logp - mu)                       # arbitrary large for actions the old policy hardly took
    rho = ratio.clamp(max=1.0).float()
    value = value.float()
    nxt = torch.cat([value[1:], torch.zeros_like(value[:1])]) * torch.cat([live[1:], torch.zeros_like(live[:1])]).float()
    delta = rho * (rew + GAMMA * nxt - value)
    acc, out = torch.zeros_like(value[0]), []
    for t in reversed(range(HORIZON)):
        acc = delta[t] + GAMMA * rho[t] * acc
        out.append(value[t] + acc)
    vs = torch.stack(out[::-1])
    vnext = torch.cat([vs[1:], torch.zeros_like(vs[:1])])
    return vs, rho * (rew + GAMMA * vnext * (nxt != 0) - value)

def run(steps=80):
    gen = torch.Generator().manual_seed(64)
    env = Corridor(24, gen)
    stale = torch.tensor([-0.05, -3.2, -17.0]).log_softmax(-1)      # nearly always walks left
    opt_pi = torch.optim.RMSprop([*net.body.parameters(), *net.pi.parameters()], lr=2e-3)
    opt_v = torch.optim.Adam(net.v.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=50)
    watch(*MODULES)
    for it in range(steps):
        if it % 2:
            behave = lambda o: stale.expand(o.size(0), -1)
        else:
            behave = lambda o: net(o)[0].detach()
        obs, act, rew, mu, live = env.rollout(behave)
        if it % 2:                                                      # demonstrations inserted into old rollouts
            act[:, :3] = 2
            mu[:, :3] = stale[2]
        with torch.autocast("cpu", dtype=torch.float16):
            logits, value = net(obs)
            logp = logits.gather(-1, act[..., None]).squeeze(-1)
            vs, adv = vtrace(logp, mu.to(logp.dtype), rew, value, live)
        w = live.float() / live.sum()
        pg = -(logp.float() * adv * w).sum()
        ent = -(logits.float().exp() * logits.float()).sum(-1).mul(w).sum()
        loss = pg + 0.5 * ((value.float() - vs).square() * w).sum() - 0.01 * ent
        for o in (opt_pi, opt_v):
            o.zero_grad()
        scaler.scale(loss).backward()
        for o in (opt_pi, opt_v):
            scaler.step(o)
        scaler.update()
        if it % 20 == 18:
            print(f"it {it} loss {loss.item():.4f} return {rew.sum(0).mean().item():.3f}")

torch.set_num_threads(1)
torch.manual_seed(6)
net = ActorCritic()
MODULES = [net]
run()
