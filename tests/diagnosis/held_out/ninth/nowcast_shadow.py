"""Rain-radar nowcasting; validation runs on an averaged copy of the weights."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class ConvGRUCell(nn.Module):
    def __init__(self, c_in, c_hid):
        super().__init__()
        self.gates = nn.Conv2d(c_in + c_hid, 2 * c_hid, 3, padding=1)
        self.cand = nn.Conv2d(c_in + c_hid, c_hid, 3, padding=1)

    def forward(self, x, h):
        z, r = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
        n = torch.tanh(self.cand(torch.cat([x, r * h], 1)))
        return (1 - z) * h + z * n


class Nowcaster(nn.Module):
    def __init__(self, hid=16):
        super().__init__()
        self.hid = hid
        self.cell = ConvGRUCell(1, hid)
        self.out = nn.Conv2d(hid, 1, 1)

    def forward(self, clip):
        h = clip.new_zeros(clip.shape[0], self.hid, *clip.shape[-2:])
        for t in range(clip.shape[1]):
            h = self.cell(clip[:, t], h)
        return clip[:, -1] + self.out(h)


class ShadowWeights:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        mine = list(self.model.parameters())
        live = [p.detach().to(m.dtype) for p, m in zip(model.parameters(), mine)]
        torch._foreach_lerp_(mine, live, 1.0 - self.decay)  # CAUSE


def radar(n, gen, size=16, frames=5):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pos = torch.rand(n, 2, generator=gen) * size
    vel = torch.randn(n, 2, generator=gen)
    clip = []
    for t in range(frames):
        c = pos + t * vel
        d2 = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
        clip.append(torch.exp(-d2 / 8))
    clip = torch.stack(clip, 1)[:, :, None]
    return clip[:, :-1], clip[:, -1]


torch.set_num_threads(1)
torch.manual_seed(15)
model = Nowcaster()
shadow = ShadowWeights(model, decay=0.999)
MODULES = [model, shadow.model]
gen = torch.Generator().manual_seed(3)
val_x, val_y = radar(32, torch.Generator().manual_seed(1000))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
watch(*MODULES)

for step in range(1, 121):
    x, y = radar(12, gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
    loss = F.smooth_l1_loss(pred.float(), y, beta=0.1)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    shadow.update(model)
    if step % 30 == 0:
        with torch.no_grad():
            dtype = next(shadow.model.parameters()).dtype
            avg = F.smooth_l1_loss(shadow.model(val_x.to(dtype)).float(), val_y, beta=0.1)
            raw = F.smooth_l1_loss(model(val_x), val_y, beta=0.1)
        print(f"{step} train {loss.item():.4f} val {raw.item():.4f} val(averaged) {avg.item():.4f}")
