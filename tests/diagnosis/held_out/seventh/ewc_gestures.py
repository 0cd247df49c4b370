"""Two gesture vocabularies learnt one after the other; the second phase is held back by a quadratic penalty."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)
gen = torch.Generator().manual_seed(202)
T, C, NUM = 18, 6, 10

class GestureNet(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.conv = nn.Conv1d(C, h, 5, padding=2)
        self.rnn = nn.GRUCell(h, h)
        self.fc = nn.Linear(h, NUM)

    def forward(self, x):
        z = torch.tanh(self.conv(x))[:, :, ::3]
        s = x.new_zeros(x.size(0), self.rnn.hidden_size)
        for t in range(z.size(-1)):
            s = self.rnn(z[:, :, t].float(), s.float())
        return self.fc(s)

class Vocabulary:
    def __init__(self, labels):
        self.labels = torch.tensor(labels)
        self.proto = torch.randn(NUM, C, T, generator=gen)

    def sample(self, n=32):
        y = self.labels[torch.randint(0, len(self.labels), (n,), generator=gen)]
        return self.proto[y] + 0.5 * torch.randn(n, C, T, generator=gen), y

net = GestureNet()
MODULES = [net]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=400)
amp = lambda: torch.autocast("cpu", dtype=torch.float16)
first, second = Vocabulary([0, 1, 2, 3, 4]), Vocabulary([5, 6, 7, 8, 9])

def task_loss(vocab, n=32):
    x, y = vocab.sample(n)
    with amp():
        return F.cross_entropy(net(x), y)

def importance(vocab, batches=12):
    fisher = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    for _ in range(batches):
        net.zero_grad()
        scaler.scale(task_loss(vocab, 8)).backward()
        for k, p in net.named_parameters():
            fisher[k] += p.grad.pow(2) / batches  # CAUSE
    net.zero_grad()
    return fisher

def phase(vocab, steps, lr, fisher=None, anchor=None, lam=20.0):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    for i in range(steps):
        loss = task_loss(vocab)
        if fisher is not None:
            loss = loss + lam * sum((fisher[k] * (p - anchor[k]) ** 2).sum() for k, p in net.named_parameters())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

@torch.no_grad()
def accuracy(vocab):
    x, y = vocab.sample(200)
    with amp():
        return (net(x).argmax(-1) == y).float().mean().item()

watch(*MODULES)
phase(first, 50, 3e-3)
print(f"after phase 1: first {accuracy(first):.2f} second {accuracy(second):.2f}")
fisher = importance(first)
anchor = {k: p.detach().clone() for k, p in net.named_parameters()}
phase(second, 60, 3e-3, fisher, anchor)
print(f"after phase 2: first {accuracy(first):.2f} second {accuracy(second):.2f}")
