import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(45)


class Capsules(nn.Module):
    """primary capsules -> class capsules, two routing iterations"""

    def __init__(self, n_in=8, d_in=6, n_out=4, d_out=8):
        super().__init__()
        self.stem = nn.Linear(30, n_in * d_in)
        self.W = nn.Parameter(0.2 * torch.randn(n_in, n_out, d_in, d_out))
        self.shape = (n_in, d_in)

    @staticmethod
    def squash(s):
        n2 = s.float().pow(2).sum(-1, keepdim=True)
        return n2 / (1 + n2) * s.float() * torch.rsqrt(n2 + 1e-8)

    def forward(self, x):
        u = self.squash(self.stem(x).view(-1, *self.shape))
        votes = torch.einsum("bid,iodk->biok", u, self.W)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            c = logits.softmax(-1).unsqueeze(-1)
            v = self.squash((c * votes).sum(1))
            logits = logits + (votes.float() * v.unsqueeze(1)).sum(-1).detach()
        return v.flatten(1)


def batch_hard(emb, y, margin=0.3):
    emb = emb.float()
    d2 = (emb.unsqueeze(1) - emb.unsqueeze(0)).pow(2).sum(-1)
    eye = torch.eye(len(y), dtype=torch.bool)
    same = (y[:, None] == y[None]) & ~eye
    diff = y[:, None] != y[None]
    far = d2.masked_fill(~same, float("-inf")).amax(1)
    near = d2.masked_fill(~diff, float("inf")).amin(1)
    valid = same.any(1) & diff.any(1)
    active = valid & (far + margin > near)
    if not active.any():
        return None
    return (far[active] + margin - near[active]).mean()


def sampler(g):
    proto = torch.randn(12, 30, generator=g)
    while True:
        k = int(torch.randint(0, 6, (1,), generator=g))
        if k == 0:                    # a shard with a single identity
            y = torch.full((12,), int(torch.randint(0, 12, (1,), generator=g)))
        else:
            y = torch.randint(0, 12, (12,), generator=g)
        yield proto[y] + 0.9 * torch.randn(12, 30, generator=g), y


net = Capsules()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=25)
watch(*MODULES)
stream = sampler(torch.Generator().manual_seed(450))
done = empty = 0
while done < 60:
    x, y = next(stream)
    with torch.autocast("cpu", dtype=torch.float16):
        emb = net(x)
    loss = batch_hard(emb, y)
    if loss is None:
        empty += 1
        continue
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    done += 1
    if done % 15 == 0:
        print(done, "empty", empty, round(loss.item(), 4))
