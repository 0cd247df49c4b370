"""Actor-critic agent on a target-reaching task; the optimizer gathers several steps' gradients before it moves the parameters."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1780)
OBS, ACTIONS, HIDDEN, ENVS, UNROLL = 6, 5, 48, 32, 6


class AdamTF(torch.optim.Adam):
    """Adam that really steps in every `gradient_accumulation`-th call only, with the mean of what it saw since the last time."""

    def __init__(self, params, gradient_accumulation=1, **kwargs):
        super().__init__(params, **kwargs)
        self._acc_steps, self._calls, self._acc = gradient_accumulation, 0, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self._acc:
                    self._acc[p] = torch.zeros_like(p)
                self._acc[p].add_(p.grad, alpha=1.0 / self._acc_steps)
        self._calls += 1
        if self._calls % self._acc_steps:
            return None
        for p, acc in self._acc.items():
            p.grad = acc.clone()
            acc.zero_()
        return super().step(closure)


class ActorCriticNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)

    def forward(self, observation):
        h = self.trunk(observation)
        return self.actor(h).float(), self.critic(h).float().squeeze(-1)


class Reach:
    """A point and a target in the plane; four moves and standing still; the reward is how much nearer it comes."""
    MOVES = torch.tensor([[0.0, 0.0], [0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])

    def __init__(self, n, gen):
        self.n, self.gen = n, gen
        self.pos, self.goal = torch.zeros(n, 2), torch.rand(n, 2, generator=gen) * 2 - 1

    def observe(self):
        d = self.goal - self.pos
        return torch.cat((self.pos, self.goal, d), dim=1)

    def step(self, action):
        before = (self.goal - self.pos).norm(dim=1)
        self.pos = self.pos + self.MOVES[action]
        after = (self.goal - self.pos).norm(dim=1)
        done = (after < 0.2) | (torch.rand(self.n, generator=self.gen) < 0.05)
        self.goal = torch.where(done[:, None], torch.rand(self.n, 2, generator=self.gen) * 2 - 1, self.goal)
        self.pos = torch.where(done[:, None], torch.zeros(self.n, 2), self.pos)
        return (before - after) * 5, done


class Algorithm:
    def __init__(self, net, optimizer, gamma=0.9, entropy_weight=0.01):
        self.net, self.optimizer, self.gamma, self.entropy_weight = net, optimizer, gamma, entropy_weight
        self._grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=40)

    @torch.no_grad()
    def unroll(self, env, gen):
        obs, actions, rewards, dones = [], [], [], []
        for _ in range(UNROLL):
            obs.append(env.observe())
            with torch.autocast("cpu", dtype=torch.float16):
                logits, _ = self.net(obs[-1])
            actions.append(torch.multinomial(logits.softmax(-1), 1, generator=gen).squeeze(1))
            reward, done = env.step(actions[-1])
            rewards.append(reward), dones.append(done.float())
        return torch.stack(obs), torch.stack(actions), torch.stack(rewards), torch.stack(dones), env.observe()

    def update(self, exp):
        obs, actions, rewards, dones, last = exp
        with torch.autocast("cpu", dtype=torch.float16):
            logits, values = self.net(obs)
            with torch.no_grad():
                ret = self.net(last)[1]
        returns = []
        for r, d in zip(rewards.flip(0), dones.flip(0)):
            ret = r + self.gamma * (1 - d) * ret
            returns.insert(0, ret)
        returns = torch.stack(returns)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        advantage = returns - values.detach()
        pg = -(logp.gather(-1, actions[..., None]).squeeze(-1) * advantage).mean()
        td = F.smooth_l1_loss(values, returns)
        loss = pg + 0.5 * td - self.entropy_weight * entropy
        self._backward_and_gradient_update(loss)
        return {"td_loss": td.item(), "entropy": entropy.item(), "reward": rewards.mean().item()}

    def _backward_and_gradient_update(self, loss):
        self.optimizer.zero_grad()
        self._grad_scaler.scale(loss).backward()
        self._grad_scaler.step(self.optimizer)
        self._grad_scaler.update()


net, gen = ActorCriticNetwork(), torch.Generator().manual_seed(5)
watch(net)
algorithm = Algorithm(net, AdamTF(net.parameters(), lr=1e-2, gradient_accumulation=2))
env, summary = Reach(ENVS, gen), []
for it in range(120):
    summary.append(algorithm.update(algorithm.unroll(env, gen)))
    if (it + 1) % 12 == 0:
        print(f"iteration {it + 1} " + " ".join(f"{k} {sum(s[k] for s in summary[-12:]) / 12:.4f}" for k in summary[0]))

MODULES = (net,)
