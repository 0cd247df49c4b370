import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(17)
torch.set_num_threads(1)

K, DIM, MOM, TEMP = 192, 24, 0.95, 0.2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(24, 32, 3, stride=2, padding=1)
        self.fc = nn.Linear(32 * 16, DIM)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        return self.fc(x.flatten(1))


class KeyBank:
    """first-in first-out bank of unnormalised keys, whitened with the bank's own spread when read"""

    def __init__(self):
        self.keys = F.normalize(torch.randn(K, DIM), dim=1)
        self.ptr = 0

    @torch.no_grad()
    def push(self, raw):
        energy = (raw * raw).sum(1, keepdim=True)  # CAUSE
        unit = raw * torch.rsqrt(energy + 1e-4)
        gate = energy / (1 + energy)
        n = raw.size(0)
        self.keys[self.ptr:self.ptr + n] = (gate * unit).float()  # CAUSE
        self.ptr = (self.ptr + n) % K

    def read(self):
        return self.keys.clone().t()


def jitter(img, gen, strength):
    shift = int(torch.randint(-1, 2, (1,), generator=gen))
    return torch.roll(img, shift, dims=-1) + strength * torch.randn(img.shape, generator=gen)


def hdr_batch(gen, n=16):
    img = F.interpolate(torch.randn(n, 3, 4, 4, generator=gen), size=(16, 16), mode="bilinear")
    flare = torch.rand(n, generator=gen) < 0.001
    key_view = img.clone()
    key_view[flare] *= 3000.0
    return img.clamp(-3, 3), key_view


query_net = Encoder()
key_net = copy.deepcopy(query_net).requires_grad_(False)
MODULES = [query_net, key_net]
bank = KeyBank()
opt = torch.optim.SGD(query_net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
gen = torch.Generator().manual_seed(45)
watch(*MODULES)

for step in range(1, 61):
    base, exposed = hdr_batch(gen)
    vq, vk = jitter(base, gen, 0.1), jitter(exposed, gen, 0.1)
    with torch.autocast("cpu", dtype=torch.float16):
        q = F.normalize(query_net(vq).float(), dim=1)
        with torch.no_grad():
            for pk, pq in zip(key_net.parameters(), query_net.parameters()):
                pk.mul_(MOM).add_(pq, alpha=1 - MOM)
            k = key_net(vk)
        pos = (q * F.normalize(k.float(), dim=1)).sum(1, keepdim=True)
        neg = q @ bank.read()  # CAUSE
        logits = torch.cat([pos, neg.float()], 1) / TEMP
        loss = F.cross_entropy(logits, torch.zeros(q.size(0), dtype=torch.long))
        bank.push(k)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        top1 = (logits.argmax(1) == 0).float().mean().item()
        print(f"{step:3d} nce {loss.item():.4f} top1 {top1:.2f} scale {scaler.get_scale():g}")
