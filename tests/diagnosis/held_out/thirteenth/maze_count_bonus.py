"""Exploration of a maze with a bonus for rarely visited cells (beta / sqrt of the number of visits); actor-critic in bf16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(10)

SIDE, WORKERS, HORIZON, UPDATES = 7, 32, 10, 90
MOVES = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])


class Maze:
    """All workers start in a corner; only the opposite corner pays, and little."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.at = torch.zeros(WORKERS, 2, dtype=torch.long)

    def observe(self):
        return F.one_hot(self.at, SIDE).flatten(1).float()

    def cell(self):
        return self.at[:, 0] * SIDE + self.at[:, 1]

    def step(self, action):
        slip = torch.rand(WORKERS, generator=self.gen) < 0.1
        random = torch.randint(4, (WORKERS,), generator=self.gen)
        self.at = (self.at + MOVES[torch.where(slip, random, action)]).clamp(0, SIDE - 1)
        return (self.cell() == SIDE * SIDE - 1).float() * 0.1


class VisitCounter(nn.Module):
    def __init__(self, cells, beta=0.5):
        super().__init__()
        self.beta = beta
        self.register_buffer("visits", torch.ones(cells))

    @torch.no_grad()
    def forward(self, cell):
        self.visits.index_add_(0, cell, torch.ones_like(cell, dtype=self.visits.dtype))  # CAUSE
        return self.beta * self.visits[cell].float().rsqrt()


class ActorCritic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2 * SIDE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.policy(h).float(), self.value(h).float().squeeze(-1)


agent = ActorCritic()
counter = VisitCounter(SIDE * SIDE).to(torch.bfloat16)
watch(agent, counter)
optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)
maze = Maze(seed=4)
seen = torch.zeros(SIDE * SIDE, dtype=torch.long)

for update in range(UPDATES):
    maze.reset()
    log_probs, values, rewards, entropies = [], [], [], []
    for _ in range(HORIZON):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, value = agent(maze.observe())
        pi = torch.distributions.Categorical(logits=logits)
        action = torch.multinomial(pi.probs.detach(), 1, generator=maze.gen).squeeze(1)
        reward = maze.step(action)
        rewards.append(reward + counter(maze.cell()))
        seen += torch.bincount(maze.cell(), minlength=SIDE * SIDE)
        log_probs.append(pi.log_prob(action))
        values.append(value)
        entropies.append(pi.entropy())
    returns, target = [], torch.zeros(WORKERS)
    for reward in reversed(rewards):
        target = reward + 0.95 * target
        returns.insert(0, target)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = (returns - values).detach()
    loss = (-(torch.stack(log_probs) * advantage).mean() + 0.5 * F.mse_loss(values, returns)
            - 0.01 * torch.stack(entropies).mean())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    if update % 10 == 9:
        print(f"{update:3d} loss {loss.item():.4f} bonus {torch.stack(rewards).mean():.4f} "
              f"counted {counter.visits.sum().item():.0f} of {int(seen.sum()) + SIDE * SIDE} cells found {int((seen > 0).sum())}")
