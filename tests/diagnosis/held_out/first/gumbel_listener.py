import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(505)
gen = torch.Generator().manual_seed(506)
WORDS, HID, ACCUM = 10, 32, 2


class Speaker(nn.Module):
    """emits discrete symbols with straight-through gumbel; memory carried over chunks of a stream"""

    def __init__(self, n_in):
        super().__init__()
        self.read = nn.Linear(n_in + HID, HID)
        self.say = nn.Linear(HID, WORDS)
        self.critic = nn.Linear(HID, 1)              # kept for checkpoints of the RL variant, unused

    def forward(self, x, h, tau):
        words = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.read(torch.cat([x[:, t], h], 1))).float()
            logits = self.say(h).float()
            noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=gen).clamp(1e-9, 1 - 1e-6)))
            soft = torch.softmax((logits + noise) / tau, -1)
            hard = F.one_hot(soft.argmax(-1), WORDS).float()
            words.append(hard + soft - soft.detach())
        return torch.stack(words, 1), h


class Listener(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.conv = nn.Conv1d(WORDS, 32, 3, padding=1)
        self.out = nn.Linear(32, n_out)

    def forward(self, w):
        return self.out(F.relu(self.conv(w.transpose(1, 2))).transpose(1, 2))


class World:
    def __init__(self, batch):
        self.state = torch.randn(batch, 4, generator=gen)

    def chunk(self, n):
        seq = []
        for _ in range(n):
            self.state = 0.95 * self.state + 0.3 * torch.randn(self.state.shape, generator=gen)
            seq.append(self.state)
        done = torch.rand(len(self.state), generator=gen) < 0.1
        self.state = torch.where(done[:, None], torch.randn(self.state.shape, generator=gen), self.state)
        return torch.stack(seq, 1), done


vision = nn.Sequential(nn.Linear(4, 24), nn.ReLU()).requires_grad_(False)
speaker, listener = Speaker(24), Listener(4)
MODULES = [vision, speaker, listener]
watch(*MODULES)
opt = torch.optim.Adam([*speaker.parameters(), *listener.parameters()], lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24, growth_interval=1000)
world, h = World(16), torch.zeros(16, HID)

for it in range(1, 121):
    x, done = world.chunk(6)
    h = h.detach()
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            feats = vision(x)
        words, h = speaker(feats, h, tau=max(0.5, 1.5 - it / 100))
        guess = listener(words)
        loss = 1e-5 * F.mse_loss(guess.float(), x) / ACCUM          # metres squared
    h = h.masked_fill(done[:, None], 0.0)
    scaler.scale(loss).backward()
    if it % ACCUM == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_([p for p in (*speaker.parameters(), *listener.parameters()) if p.grad is not None], 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    if it % 20 == 0:
        used = (words.detach().argmax(-1).flatten().bincount(minlength=WORDS) > 0).sum().item()
        print(f"{it} loss {loss.item():.3e} words {used} scale {scaler.get_scale():g}")
