import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

# WGAN-GP for ledger rows: a few continuous columns and one categorical column.


class Generator(nn.Module):
    def __init__(self, z=12, cols=4, cats=5):
        super().__init__()
        self.cols = cols
        self.f = nn.Sequential(nn.Linear(z, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, cols + cats))

    def forward(self, z, rng):
        out = self.f(z).float()
        num, cat = out[:, :self.cols], out[:, self.cols:]
        u = torch.rand(cat.shape, generator=rng)
        gumbel = -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)))
        return torch.cat([num, torch.softmax((cat + gumbel) / 0.5, -1)], 1)


def make_critic(n=9):
    return nn.Sequential(nn.Linear(n, 96), nn.Softplus(), nn.Linear(96, 96), nn.Softplus(), nn.Linear(96, 1))


def ledger(n, rng):
    kind = torch.multinomial(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]), n, replacement=True, generator=rng)
    amount = torch.randn(n, 4, generator=rng) * 0.3 + torch.stack([kind.float() / 2, kind.sin(), kind.cos(), (kind % 2).float()], 1)
    return torch.cat([amount, nn.functional.one_hot(kind, 5).float()], 1)


class Game:
    def __init__(self, gen, critic):
        self.gen, self.critic = gen, critic
        self.g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
        self.c_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=40)
        self.rng = torch.Generator().manual_seed(33)

    def penalty(self, real, fake):
        a = torch.rand(real.shape[0], 1, generator=self.rng)
        mix = (a * real + (1 - a) * fake).requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            score = self.critic(mix)
        big, = torch.autograd.grad(self.scaler.scale(score.float().sum()), mix, create_graph=True)
        grad = big * (1.0 / self.scaler.get_scale())
        return ((grad.square().sum(1) + 1e-12).sqrt() - 1).square().mean()

    def critic_turn(self, real):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            fake = self.gen(torch.randn(real.shape[0], 12, generator=self.rng), self.rng)
        with torch.autocast("cpu", dtype=torch.float16):
            gap = self.critic(fake).float().mean() - self.critic(real).float().mean()
        gp = self.penalty(real, fake)
        self.c_opt.zero_grad(set_to_none=True)
        self.scaler.scale(gap + 10.0 * gp).backward()
        self.scaler.step(self.c_opt)
        self.scaler.update()
        return gap.item(), gp.item()

    def gen_turn(self, n):
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.gen(torch.randn(n, 12, generator=self.rng), self.rng)
            loss = -self.critic(fake).float().mean()
        self.g_opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.g_opt)
        self.scaler.update()
        return loss.item()


def run(game, rounds=90, n_critic=3):
    watch(*MODULES)
    g_loss = float("nan")
    for step in range(1, rounds + 1):
        gap, gp = game.critic_turn(ledger(64, game.rng))
        if step % n_critic == 0:
            g_loss = game.gen_turn(64)
        if step % 15 == 0:
            print(step, f"W {-gap:.3f} gp {gp:.4f} g {g_loss:.3f} scale {game.scaler.get_scale():g}")


torch.set_num_threads(1)
torch.manual_seed(46)
MODULES = [Generator(), make_critic()]
run(Game(*MODULES))
