"""Value of a dispatching rule for lifts, by temporal differences from logged trips.
Targets use the invertible value rescaling h(x) = sign(x)(sqrt(|x|+1)-1) + eps x of R2D2 and MuZero."""
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(12)

FLOORS, QUEUE, GAMMA, EPS = 8, 6, 0.9, 1e-3


def h(x):
    return torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + EPS * x


def h_inverse(y):
    root = torch.sqrt(1 + 4 * EPS * (y.abs() + 1 + EPS))  # CAUSE
    return torch.sign(y) * (((root - 1) / (2 * EPS)).square() - 1)


class TripLog:
    """Transitions (floor, queue) -> cost of waiting -> next state, and the exact value of each state."""

    def __init__(self, seed=5):
        self.gen = torch.Generator().manual_seed(seed)
        n = FLOORS * QUEUE
        self.transition = torch.rand(n, n, generator=self.gen).pow(6)
        self.transition /= self.transition.sum(1, keepdim=True)
        floor, queue = torch.arange(n) // QUEUE, torch.arange(n) % QUEUE
        self.reward = 0.5 * queue.float() + 0.15 * floor.float()
        self.value = torch.linalg.solve(torch.eye(n) - GAMMA * self.transition, self.reward)
        self.features = torch.cat([nn.functional.one_hot(floor, FLOORS), nn.functional.one_hot(queue, QUEUE)], 1).float()

    def sample(self, size):
        s = torch.randint(len(self.reward), (size,), generator=self.gen)
        return s, self.reward[s], torch.multinomial(self.transition[s], 1, generator=self.gen).squeeze(1)


class Critic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FLOORS + QUEUE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


class Learner:
    def __init__(self, log, lr=3e-3, sync_every=4):
        self.log, self.sync_every = log, sync_every
        self.online, self.target = Critic(), Critic()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        watch(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=lr)

    def update(self, step, batch=128):
        s, r, s_next = self.log.sample(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                bootstrap = h_inverse(self.target(self.log.features[s_next]))
                goal = h(r + GAMMA * bootstrap)
            loss = nn.functional.smooth_l1_loss(self.online(self.log.features[s]).float(), goal.float())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        if step % self.sync_every == self.sync_every - 1:
            self.target.load_state_dict(self.online.state_dict())
        return loss.item()

    @torch.no_grad()
    def error(self):
        estimate = h_inverse(self.online(self.log.features))
        return (estimate.mean() - self.log.value.mean()).item(), self.log.value.mean().item()


if __name__ == "__main__":
    learner = Learner(TripLog())
    for step in range(100):
        loss = learner.update(step)
        if step % 10 == 9:
            bias, mean = learner.error()
            print(f"{step:3d} loss {loss:.4f} mean value {mean + bias:.2f} (exact {mean:.2f})")
