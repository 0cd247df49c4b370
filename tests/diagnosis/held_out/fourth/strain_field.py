import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(37)


class DisplacementField(nn.Module):
    """(x, y, load) -> in-plane displacement of the specimen surface, SI units"""

    def __init__(self, width=32):
        super().__init__()
        self.freq = nn.Linear(3, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, q):
        h = torch.sin(self.freq(q))
        h = torch.tanh(self.mid(h))
        return self.out(h)  # CAUSE


def camera_frame(g, n=8192):
    xy = 2 * torch.rand(n, 2, generator=g) - 1
    load = (0.5 + 0.5 * torch.rand(1, 1, generator=g)).expand(n, 1)
    strain = torch.stack([1.2e-4 * xy[:, 0], -0.4e-4 * xy[:, 1]], 1) * load
    bend = 3e-5 * torch.sin(3 * xy[:, :1]) * load
    measured = strain + bend + 1e-6 * torch.randn(n, 2, generator=g)
    return torch.cat([xy, load], 1), measured


def main(frames=70):
    watch(*MODULES)
    g = torch.Generator().manual_seed(3)
    opt = torch.optim.Adam([{"params": field.out.parameters(), "lr": 1e-6},
                            {"params": [*field.freq.parameters(), *field.mid.parameters()], "lr": 1e-4}])
    seen = []
    for k in range(1, frames + 1):
        query, disp = camera_frame(g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = field(query)
        loss = nn.functional.mse_loss(pred.float(), disp)
        loss.backward()  # CAUSE
        opt.step()
        seen.append((loss / disp.square().mean()).item())
        if k % 10 == 0:
            print(f"frame {k} unexplained variance {sum(seen[-10:]) / 10:.3f} of 1")


field = DisplacementField()
MODULES = [field]
main()
