"""Double DQN with proportional prioritised replay on a corridor with a rare jackpot."""
import copy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
rng = np.random.default_rng(23)

LENGTH, ACTIONS, GAMMA = 12, 3, 0.95


class Replay:
    """Transitions in half precision to save memory; priorities as in Schaul et al."""

    def __init__(self, capacity=2048, alpha=0.6, beta=0.4):
        self.obs = np.zeros((capacity, LENGTH), np.float16)
        self.next_obs = np.zeros((capacity, LENGTH), np.float16)
        self.action = np.zeros(capacity, np.int64)
        self.reward = np.zeros(capacity, np.float16)
        self.done = np.zeros(capacity, np.float16)
        self.priority = np.zeros(capacity, np.float32)
        self.alpha, self.beta, self.size, self.ptr, self.capacity = alpha, beta, 0, 0, capacity

    def push(self, o, a, r, o2, d):
        i = self.ptr
        self.obs[i], self.action[i], self.reward[i], self.next_obs[i], self.done[i] = o, a, r, o2, d
        self.priority[i] = 1.0
        self.ptr, self.size = (i + 1) % self.capacity, min(self.size + 1, self.capacity)

    def sample(self, n):
        p = self.priority[: self.size] ** self.alpha
        cumulative = np.cumsum(p)
        idx = np.searchsorted(cumulative, rng.random(n) * cumulative[-1]).clip(0, self.size - 1)
        weight = (self.size * p[idx] / cumulative[-1]) ** -self.beta
        weight = torch.from_numpy((weight / weight.max()).astype(np.float32))
        fields = (self.obs, self.action, self.reward, self.next_obs, self.done)
        return idx, weight, [torch.from_numpy(f[idx]) for f in fields]

    def set_priorities(self, idx, td):
        self.priority[idx] = (td.square() + 1e-3).numpy()  # CAUSE


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, ACTIONS)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


def observe(pos):
    o = np.zeros(LENGTH, np.float16)
    o[pos] = 1
    return o


def env_steps(replay, count, pos):
    for _ in range(count):
        a = int(rng.integers(ACTIONS))
        nxt = int(np.clip(pos + a - 1, 0, LENGTH - 1))
        done = nxt == LENGTH - 1
        r = (350.0 if rng.random() < 0.03 else 5.0) if done else 0.1 * a
        replay.push(observe(pos), a, r, observe(nxt), float(done))
        pos = 0 if done else nxt
    return pos


online = QNet()
target = copy.deepcopy(online).requires_grad_(False)
watch(online, target)
opt = torch.optim.RMSprop(online.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=500)
replay = Replay()
position = env_steps(replay, 200, 0)

for step in range(90):
    position = env_steps(replay, 12, position)
    idx, weight, (obs, action, reward, next_obs, done) = replay.sample(32)
    with torch.autocast("cpu", dtype=torch.float16):
        q = online(obs.float()).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = online(next_obs.float()).argmax(-1, keepdim=True)
            backup = reward + GAMMA * (1 - done) * target(next_obs.float()).gather(1, best).squeeze(1)
        td = backup - q
        loss = (weight * F.smooth_l1_loss(q.float(), backup.float(), reduction="none")).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    replay.set_priorities(idx, td.detach())
    if step % 20 == 19:
        target.load_state_dict(online.state_dict())
    if step % 6 == 0:
        print(f"{step:3d} loss {loss.item():.3f} reward {reward.float().mean():.2f} scale {scaler.get_scale():g}")
