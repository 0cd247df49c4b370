"""Species from MALDI-TOF spectra. About one label in twelve comes from a mixed-up plate, hence the robust loss."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)

BINS, SPECIES, PLATES = 96, 8, 640
WARMUP, STEPS, Q = 10, 100, 0.7


def simulate(seed=17):
    g = torch.Generator().manual_seed(seed)
    peaks = (torch.rand(SPECIES, BINS, generator=g) < 0.18).float() * torch.rand(SPECIES, BINS, generator=g)
    truth = torch.randint(SPECIES, (PLATES,), generator=g)
    gain = 0.6 + 0.8 * torch.rand(PLATES, 1, generator=g)
    spectra = peaks[truth] * gain + 0.05 * torch.rand(PLATES, BINS, generator=g)
    label = truth.clone()
    mixed = torch.rand(PLATES, generator=g) < 0.08
    label[mixed] = torch.randint(SPECIES, (int(mixed.sum()),), generator=g)
    return spectra.sqrt() * 3.0, label, truth


class Mixer(nn.Module):
    def __init__(self, width=64, depth=2, temperature=0.03):
        super().__init__()
        self.stem = nn.Linear(BINS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth))
        self.prototypes = nn.Parameter(torch.randn(SPECIES, width))
        self.temperature = temperature

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        cosine = F.linear(F.normalize(h, dim=-1, eps=1e-4), F.normalize(self.prototypes, dim=-1))
        return cosine / self.temperature


def gce(logits, label, q=Q):
    """Generalised cross entropy, (1 - p_y^q) / q."""
    p = F.softmax(logits, dim=-1)
    p_y = p.gather(1, label[:, None]).squeeze(1)
    return ((1.0 - p_y.pow(q)) / q).mean()  # CAUSE


spectra, label, truth = simulate()
net = Mixer()
watch(net)
opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
order = torch.Generator().manual_seed(8)


def epochs(batch=32):
    while True:
        for chunk in torch.randperm(PLATES, generator=order).split(batch):
            yield spectra[chunk], label[chunk]


for step, (x, y) in enumerate(epochs()):
    if step == STEPS:
        break
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
        loss = F.cross_entropy(logits, y) if step < WARMUP else gce(logits, y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        with torch.no_grad():
            acc = (net(spectra).argmax(1) == truth).float().mean()
        print(f"{step:3d} loss {loss.item():.4f} clean accuracy {acc:.3f} scale {scaler.get_scale():g}")
