import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(4)


class Corridor:
    """Start somewhere on a line, reach the door at 0. Shorter is better."""

    def __init__(self, seed, limit=20):
        self.rng = torch.Generator().manual_seed(seed)
        self.limit = limit

    def reset(self, low):
        self.pos = int(torch.randint(low, low + 8, (1,), generator=self.rng))
        self.t = 0
        return self.obs()

    def obs(self):
        noise = 0.05 * torch.randn(3, generator=self.rng)
        return torch.tensor([self.pos / 8.0, self.t / self.limit, 1.0]) + noise

    def step(self, action):
        self.pos += (-2, -1, 1)[action]
        self.t += 1
        done = self.pos <= 0 or self.t >= self.limit
        return self.obs(), (1.0 if self.pos <= 0 else -0.1), done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi = nn.Linear(32, 3)
        self.v = nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h), self.v(h).squeeze(-1)


def discounted(rewards, gamma=0.97):
    out, run = [], 0.0
    for r in reversed(rewards):
        run = r + gamma * run
        out.append(run)
    return torch.tensor(out[::-1])


ac = ActorCritic()
MODULES = [ac]
optim = torch.optim.RMSprop(ac.parameters(), lr=2e-3)
env = Corridor(31)
sampler = torch.Generator().manual_seed(77)
watch(*MODULES)

for episode in range(1, 101):
    obs = env.reset(low=max(1, 6 - episode // 9))
    states, actions, rewards, done = [], [], [], False
    while not done:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits, _ = ac(obs[None])
        probs = torch.nan_to_num(logits.float().softmax(-1)[0], nan=1.0)
        a = int(torch.multinomial(probs, 1, generator=sampler))
        nxt, r, done = env.step(a)
        states.append(obs); actions.append(a); rewards.append(r)
        obs = nxt
    returns = discounted(rewards)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, value = ac(torch.stack(states))
    value = value.float()
    adv = returns - value.detach()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # CAUSE
    logp = logits.float().log_softmax(-1)
    chosen = logp[torch.arange(len(actions)), torch.tensor(actions)]
    entropy = -(logp.exp() * logp).sum(-1).mean()
    loss = -(chosen * adv).mean() + 0.5 * nn.functional.mse_loss(value, returns) - 0.01 * entropy
    optim.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(ac.parameters(), 1.0)
    optim.step()
    if episode % 10 == 0:
        print(f"episode {episode} length {len(rewards)} return {returns[0]:.3f}")
