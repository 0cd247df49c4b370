import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

LOG_STD_MIN, LOG_STD_MAX = -5, 2


class Actor(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.mu, self.log_std = nn.Linear(48, act), nn.Linear(48, act)

    def forward(self, s, gen):
        h = self.body(s)
        mu, log_std = self.mu(h).float(), self.log_std(h).float().clamp(LOG_STD_MIN, LOG_STD_MAX)
        eps = torch.randn(mu.shape, generator=gen)
        u = mu + log_std.exp() * eps
        logp = (-0.5 * eps.pow(2) - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        return torch.tanh(u), logp


class TwinQ(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.q1, self.q2 = (nn.Sequential(nn.Linear(obs + act, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)) for _ in range(2))

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Agent:
    def __init__(self, obs=3, act=1):
        self.actor, self.critic = Actor(obs, act), TwinQ(obs, act)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.temp = nn.ParameterDict({"log_alpha": nn.Parameter(torch.tensor(-1.0))})
        self.opts = {"q": torch.optim.Adam(self.critic.parameters(), lr=1e-3), "pi": torch.optim.Adam(self.actor.parameters(), lr=1e-3),
                     "alpha": torch.optim.Adam(self.temp.parameters(), lr=3e-3)}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=20)

    def learn(self, batch, step, gen):
        s, a, r, s2, done = batch
        alpha = self.temp["log_alpha"].exp().detach()
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                a2, lp2 = self.actor(s2, gen)
                y = r + 0.99 * (~done) * (torch.min(*self.target(s2, a2)).float() - alpha * lp2)
            q1, q2 = self.critic(s, a)
            q_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        used = [self.opts["q"]]
        self.opts["q"].zero_grad()
        self.scaler.scale(q_loss).backward()
        if step % 2 == 0:                                  # delayed policy
            with torch.autocast("cpu", dtype=torch.float16):
                pi, lp = self.actor(s, gen)
                pi_loss = (alpha * lp - torch.min(*self.critic(s, pi)).float()).mean()
                a_loss = -(self.temp["log_alpha"] * (lp.detach() - 1.0)).mean()
            grads = torch.autograd.grad(self.scaler.scale(pi_loss), list(self.actor.parameters()))
            for p, g in zip(self.actor.parameters(), grads):
                p.grad = g
            self.opts["alpha"].zero_grad()
            self.scaler.scale(a_loss).backward()
            used += [self.opts["pi"], self.opts["alpha"]]
        for o in used:
            self.scaler.step(o)
        self.scaler.update()
        with torch.no_grad():
            for p, t in zip(self.critic.parameters(), self.target.parameters()):
                t.lerp_(p, 0.02)
        return q_loss.item()


def pendulum(n, gen):
    th, dth = 6.28 * torch.rand(n, generator=gen) - 3.14, 4 * torch.randn(n, generator=gen)
    u = 2 * torch.rand(n, generator=gen) - 1
    cost = th.pow(2) + 0.1 * dth.pow(2) + 0.004 * u.pow(2)
    dth2 = (dth + 0.05 * (15 * th.sin() + 6 * u)).clamp(-8, 8)
    obs = lambda t, d: torch.stack([t.cos(), t.sin(), d / 8], -1)
    return obs(th, dth), u[:, None], -cost, obs(th + 0.05 * dth2, dth2), torch.rand(n, generator=gen) < 0.01


torch.set_num_threads(1)
torch.manual_seed(71)
agent = Agent()
MODULES = [agent.actor, agent.critic, agent.target, agent.temp]
watch(*MODULES)
gen = torch.Generator().manual_seed(711)
replay = pendulum(2000, gen)
for step in range(60):
    idx = torch.randint(0, 2000, (64,), generator=gen)
    ql = agent.learn([t[idx] for t in replay], step, gen)
    if step % 10 == 0:
        print(step, f"q {ql:.3f} alpha {agent.temp['log_alpha'].exp().item():.3f} scale {agent.scaler.get_scale():g}")
