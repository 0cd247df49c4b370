import random
import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(9)
random.seed(9)


class PrioritizedMemory:
    def __init__(self, cap, obs, alpha=0.6):
        self.s, self.s2 = torch.zeros(cap, obs), torch.zeros(cap, obs)
        self.a, self.r = torch.zeros(cap, dtype=torch.long), torch.zeros(cap)
        self.prio = torch.zeros(cap)
        self.alpha, self.cap, self.n, self.head = alpha, cap, 0, 0

    def push(self, s, a, r, s2):
        i = self.head
        self.s[i], self.a[i], self.r[i], self.s2[i] = s, a, r, s2
        self.prio[i] = 1.0
        self.head, self.n = (i + 1) % self.cap, min(self.n + 1, self.cap)

    def sample(self, k, beta, gen):
        p = self.prio[: self.n] ** self.alpha
        p = p / p.sum()  # CAUSE
        u = (torch.arange(k) + torch.rand(k, generator=gen)) / k
        idx = torch.searchsorted(p.cumsum(0), u).clamp(max=self.n - 1)
        w = (self.n * p[idx]) ** (-beta)
        return idx, w / w.max()

    def update(self, idx, td):
        self.prio[idx] = td.detach().float() + 1e-5  # CAUSE


class Dueling(nn.Module):
    def __init__(self, obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.value, self.adv = nn.Linear(48, 1), nn.Linear(48, n_act)

    def forward(self, s):
        h = self.body(s)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class SlotWalk:
    """walk on a ring; the reward is the coin pay-out, every now and then there is a jackpot"""

    def __init__(self, gen):
        self.gen, self.pos, self.t = gen, torch.zeros(3), 0

    def step(self, a):
        self.t += 1
        move = torch.tensor([[1.0, 0, 0.2], [-1.0, 0.3, 0], [0, -0.4, 0.1]])[a]
        self.pos = torch.sin(self.pos + 0.3 * move + 0.05 * torch.randn(3, generator=self.gen))
        r = float(self.pos.sum())
        if self.t == 263:
            r += 500.0
        return self.pos.clone(), r


gen = torch.Generator().manual_seed(90)
online, target = Dueling(3, 3), Dueling(3, 3)
target.load_state_dict(online.state_dict())
MODULES = [online, target]
memory, env = PrioritizedMemory(600, 3), SlotWalk(gen)
s = env.pos.clone()
watch(*MODULES)
opt = torch.optim.RMSprop(online.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for update in range(1, 101):
    for _ in range(150 if update == 1 else 4):
        with torch.no_grad():
            greedy = int(online(s[None]).argmax())
        a = random.randrange(3) if random.random() < 0.3 else greedy
        s2, r = env.step(a)
        memory.push(s, a, r, s2)
        s = s2
    idx, w = memory.sample(32, 0.4 + 0.006 * update, gen)
    bs, ba, br, bs2 = memory.s[idx], memory.a[idx], memory.r[idx], memory.s2[idx]
    with torch.autocast("cpu", dtype=torch.float16):
        q = online(bs).gather(1, ba[:, None]).squeeze(1)
        with torch.no_grad():
            nxt = target(bs2).gather(1, online(bs2).argmax(1, keepdim=True)).squeeze(1)
            goal = br.to(q.dtype) + 0.95 * nxt
        td2 = (q - goal).pow(2)  # CAUSE
        loss = (w * td2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    scaler.step(opt)
    scaler.update()
    memory.update(idx, td2)
    if update % 20 == 0:
        target.load_state_dict(online.state_dict())
    if update % 10 == 0:
        print(update, "loss %.4f" % loss.item(), "mean q %.3f" % q.mean().item(), "max prio %.2f" % memory.prio.max().item())
