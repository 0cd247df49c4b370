import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)
gen = torch.Generator().manual_seed(80)
OBS, ACT, GAMMA = 4, 2, 0.9


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


actor = mlp(OBS, 32, 32, ACT)
critic = mlp(OBS + ACT, 48, 48, 1)
critic_target = mlp(OBS + ACT, 48, 48, 1)
critic_target.load_state_dict(critic.state_dict())
disc = mlp(OBS + ACT, 48, 48, 1, act=nn.LeakyReLU)
MODULES = [actor, critic, critic_target, disc]


class Env:
    """a point that should be driven to the origin"""

    def reset(self):
        return torch.randn(16, OBS, generator=gen)

    def step(self, s, a):
        pos, vel = s[:, :2], s[:, 2:]
        vel = 0.9 * vel + 0.2 * a.clamp(-2, 2)
        return torch.cat([pos + 0.2 * vel, vel], 1)


def expert(s):
    return -1.5 * s[:, :2] - 1.2 * s[:, 2:]


def rollout(policy, n):
    env, out = Env(), []
    s = env.reset()
    for _ in range(n):
        a = policy(s)
        s2 = env.step(s, a)
        out.append((s, a, s2))
        s = s2
    return [torch.cat(z) for z in zip(*out)]


def imitation_reward(s, a):
    d = torch.sigmoid(disc(torch.cat([s, a], 1))).squeeze(1)  # CAUSE
    return -torch.log(1 - d + 1e-8)  # CAUSE


def train(iters=40):
    watch(*MODULES)
    es, ea, es2 = rollout(expert, 20)
    bs, ba, bs2 = rollout(lambda s: 2.0 * torch.randn(len(s), ACT, generator=gen), 20)
    opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3)
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    bce = nn.BCEWithLogitsLoss()
    for it in range(1, iters + 1):
        e = torch.randint(0, len(es), (48,), generator=gen)
        b = torch.randint(0, len(bs), (48,), generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            logit_e = disc(torch.cat([es[e], ea[e]], 1))
            logit_b = disc(torch.cat([bs[b], ba[b]], 1))
            d_loss = bce(logit_e, torch.ones_like(logit_e)) + bce(logit_b, torch.zeros_like(logit_b))
        opt_d.zero_grad()
        scaler.scale(d_loss).backward()
        scaler.step(opt_d)

        # half of the critic batch are demonstrations, as in the replay buffer of DAC
        s, a, s2 = (torch.cat(z) for z in ((es[e], bs[b]), (ea[e], ba[b]), (es2[e], bs2[b])))
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                r = imitation_reward(s, a)
                target = r + GAMMA * critic_target(torch.cat([s2, actor(s2)], 1)).squeeze(1)
            c_loss = (critic(torch.cat([s, a], 1)).squeeze(1) - target).square().mean()
        opt_c.zero_grad()
        scaler.scale(c_loss).backward()
        scaler.step(opt_c)

        with torch.autocast("cpu", dtype=torch.float16):
            a_loss = -critic(torch.cat([s, actor(s)], 1)).mean()
        opt_a.zero_grad()
        scaler.scale(a_loss).backward()
        scaler.step(opt_a)
        scaler.update()
        with torch.no_grad():
            for p, q in zip(critic.parameters(), critic_target.parameters()):
                q.lerp_(p, 0.05)
        if it % 5 == 0:
            print(f"{it:3d} d {d_loss.item():.3f} r {r.mean().item():.3f} c {c_loss.item():.3f} a {a_loss.item():.3f}")


train()
