"""Character-level MLP in the manner of makemore with a hand-written BatchNorm1d, bfloat16 autocast."""
import torch
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2147483647)
BLOCK_SIZE, N_EMBD, N_HIDDEN, BATCH, EPOCHS = 3, 10, 48, 32, 2
STARTS, MIDDLES, ENDS = ("em", "ol", "av", "ha", "mi", "so", "ka", "le"), ("i", "a", "iv", "ann", "el", "or"), ("a", "ia", "en", "y", "n")


class Linear(torch.nn.Module):
    def __init__(self, fan_in, fan_out, bias=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn((fan_in, fan_out)) / fan_in ** 0.5)
        self.bias = torch.nn.Parameter(torch.zeros(fan_out)) if bias else None

    def forward(self, x):
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class BatchNorm1d(torch.nn.Module):
    def __init__(self, dim, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.gamma, self.beta = torch.nn.Parameter(torch.ones(dim)), torch.nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x):
        x = x.float()
        if self.training:
            xmean = x.mean(0, keepdim=True)
            xvar = x.var(0, keepdim=True)  # CAUSE
        else:
            xmean, xvar = self.running_mean, self.running_var
        out = self.gamma * (x - xmean) / torch.sqrt(xvar + self.eps) + self.beta
        if self.training:
            with torch.no_grad():
                self.running_mean.copy_((1 - self.momentum) * self.running_mean + self.momentum * xmean[0])
                self.running_var.copy_((1 - self.momentum) * self.running_var + self.momentum * xvar[0])
        return out


class MLP(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.C = torch.nn.Parameter(torch.randn((vocab_size, N_EMBD)))
        self.layers = torch.nn.Sequential(
            Linear(N_EMBD * BLOCK_SIZE, N_HIDDEN, bias=False), BatchNorm1d(N_HIDDEN), torch.nn.Tanh(),
            Linear(N_HIDDEN, N_HIDDEN, bias=False), BatchNorm1d(N_HIDDEN), torch.nn.Tanh(),
            Linear(N_HIDDEN, vocab_size))

    def forward(self, idx):
        return self.layers(self.C[idx].flatten(1))


def invent_names(n, seed=42):
    gen = torch.Generator().manual_seed(seed)
    parts = (STARTS, MIDDLES, ENDS)
    return ["".join(p[int(torch.randint(0, len(p), (1,), generator=gen))] for p in parts) for _ in range(n)]


def build_dataset(words, stoi):
    X, Y = [], []
    for w in words:
        context = [0] * BLOCK_SIZE
        for ch in w + ".":
            X.append(context)
            Y.append(stoi[ch])
            context = context[1:] + [stoi[ch]]
    return torch.tensor(X), torch.tensor(Y)


words = invent_names(283)
stoi = {ch: i for i, ch in enumerate(["."] + sorted(set("".join(words))))}
Xtr, Ytr = build_dataset(words[:256], stoi)
Xdev, Ydev = build_dataset(words[256:], stoi)
print(f"{len(Xtr)} examples, {len(Xtr) % BATCH} in the last batch")
model = MLP(len(stoi))
watch(model)


@torch.no_grad()
def split_loss(x, y):
    model.eval()
    loss = F.cross_entropy(model(x).float(), y).item()
    model.train()
    return loss


g = torch.Generator().manual_seed(1)
i, lr = 0, 0.1
for epoch in range(EPOCHS):
    for ix in torch.randperm(len(Xtr), generator=g).split(BATCH):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(Xtr[ix])
        loss = F.cross_entropy(logits.float(), Ytr[ix])
        for p in model.parameters():
            p.grad = None
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p += -lr * p.grad
        if i % 10 == 0:
            print(f"{i:4d}: {loss.item():.4f}")
        i += 1
    print(f"epoch {epoch}: train {split_loss(Xtr, Ytr):.4f} dev {split_loss(Xdev, Ydev):.4f}")
MODULES = (model,)
