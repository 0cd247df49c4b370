# TD3-like control of a noisy point mass: twin critics every step, the actor only every third step.
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)


def mlp(*sizes, last=None):
    mods = []
    for a, b in zip(sizes, sizes[1:]):
        mods += [nn.Linear(a, b), nn.ELU()]
    return nn.Sequential(*mods[:-1], *([last] if last else []))


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = mlp(5, 64, 64, 1), mlp(5, 64, 64, 1)

    def forward(self, s, a):
        sa = torch.cat([s, a], -1)
        return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)


class Replay:
    def __init__(self, size, gen):
        pos, vel = torch.randn(size, 2, generator=gen) * 2, torch.randn(size, 2, generator=gen)
        act = torch.rand(size, 1, generator=gen) * 2 - 1
        push = torch.cat([act, -act], 1)
        nxt = torch.cat([pos + 0.1 * vel, 0.97 * vel + 0.1 * push], 1)
        done = nxt[:, :2].norm(dim=1) < 0.2
        reward = -nxt[:, :2].square().sum(1) + 10.0 * done
        self.data = (torch.cat([pos, vel], 1), act, reward, nxt, done)
        self.gen, self.size = gen, size

    def sample(self, n):
        i = torch.randint(0, self.size, (n,), generator=self.gen)
        return [d[i] for d in self.data]


actor, critic = mlp(4, 48, 48, 1, last=nn.Tanh()), Twin()
actor_t, critic_t = copy.deepcopy(actor).requires_grad_(False), copy.deepcopy(critic).requires_grad_(False)
MODULES = [actor, critic, actor_t, critic_t]
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
actor_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=8)
critic_scaler = torch.amp.GradScaler("cpu", growth_interval=30)
gen = torch.Generator().manual_seed(55)
memory = Replay(4000, gen)
watch(*MODULES)

for t in range(1, 101):
    s, a, r, s2, done = memory.sample(64)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            a2 = actor_t(s2)
            a2 = (a2 + (0.2 * torch.randn(a2.shape, generator=gen)).clamp(-0.5, 0.5)).clamp(-1, 1)
            target = r + 0.98 * torch.minimum(*critic_t(s2, a2)).float().masked_fill(done, 0.0)
        q1, q2 = critic(s, a)
        critic_loss = F.smooth_l1_loss(q1.float(), target) + F.smooth_l1_loss(q2.float(), target)
    critic_opt.zero_grad(set_to_none=True)
    critic_scaler.scale(critic_loss).backward()
    critic_scaler.step(critic_opt)
    critic_scaler.update()

    if t % 3 == 0:
        with torch.autocast("cpu", dtype=torch.float16):
            actor_loss = -critic(s, actor(s))[0].float().mean()
        actor_opt.zero_grad(set_to_none=True)
        actor_scaler.scale(actor_loss).backward()
        actor_scaler.unscale_(actor_opt)
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        actor_scaler.step(actor_opt)
        actor_scaler.update()
        with torch.no_grad():
            for live, slow in ((actor, actor_t), (critic, critic_t)):
                for p, q in zip(live.parameters(), slow.parameters()):
                    q.lerp_(p, 0.02)
    if t % 15 == 0:
        print(f"t={t} critic {critic_loss.item():.3f} actor {actor_loss.item():.3f}", critic_scaler.get_scale(), actor_scaler.get_scale())
