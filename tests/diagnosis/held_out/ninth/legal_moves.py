"""Imitation of a board-game engine: illegal moves get -inf, whole boards without a legal move are left out."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

SIDE = 6
NEG = float("-inf")


class PolicyValue(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.res = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(2))
        self.policy = nn.Conv2d(ch, 1, 1)
        self.value = nn.Linear(ch, 1)

    def forward(self, board):
        h = F.relu(self.stem(board))
        for r in self.res:
            h = F.relu(h + r(h))
        return self.policy(h).flatten(1), self.value(h.mean((2, 3))).squeeze(1)


def positions(n, g):
    stones = torch.randint(0, 3, (n, SIDE, SIDE), generator=g)
    full = torch.rand(n, generator=g) < 0.04
    stones[full] = torch.randint(1, 3, (int(full.sum()), SIDE, SIDE), generator=g)
    board = F.one_hot(stones, 3).permute(0, 3, 1, 2).float()
    legal = (stones == 0).flatten(1)
    friends = F.conv2d(board[:, 1:2], torch.ones(1, 1, 3, 3), padding=1).flatten(1)
    score = friends + 0.1 * torch.rand(n, SIDE * SIDE, generator=g)
    best = score.masked_fill(~legal, NEG).argmax(1)
    outcome = torch.tanh((board[:, 1] - board[:, 2]).mean((1, 2)) * 4)
    return board, legal, best, outcome


def entropy(logp):
    p = logp.exp()
    return -torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1)


def loss_terms(net, board, legal, best, outcome):
    alive = legal.any(1)
    board, legal, best = board[alive], legal[alive], best[alive]
    with torch.autocast("cpu", dtype=torch.float16):
        raw, value = net(board)
        masked = raw.masked_fill(~legal, NEG)
        logp = F.log_softmax(masked, dim=-1)
        picked = logp.gather(1, best[:, None]).squeeze(1)
        ce = -picked.float().mean()
        mse = F.mse_loss(value, outcome[alive])
    with torch.no_grad():
        ent = entropy(logp.float()).mean()
    return ce, mse, ent, (logp.argmax(1) == best).float().mean()


torch.set_num_threads(1)
torch.manual_seed(64)
net = PolicyValue()
MODULES = [net]
opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=20)
gen = torch.Generator().manual_seed(90)
watch(*MODULES)
for step in range(1, 91):
    ce, mse, ent, top1 = loss_terms(net, *positions(32, gen))
    scaler.scale(ce + 0.5 * mse).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 15 == 0:
        print(step, f"ce {ce.item():.3f} value {mse.item():.3f} entropy {ent.item():.3f} top1 {top1.item():.2f}")
