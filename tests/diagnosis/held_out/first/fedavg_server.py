import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(50)
N_ITEMS, DIM = 40, 8


class KeyboardModel(nn.Module):
    """next-emoji model: context tower and item vectors come frozen from the data centre,
    the shared part learnt on devices is the log popularity of every item"""

    def __init__(self, log_counts):
        super().__init__()
        self.context = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, DIM))
        self.items = nn.Embedding(N_ITEMS, DIM)
        self.popularity = nn.Parameter(log_counts.clone())
        for p in (*self.context.parameters(), *self.items.parameters()):
            p.requires_grad_(False)

    def forward(self, c):
        return self.context(c) @ self.items.weight.t() + self.popularity


class Client:
    def __init__(self, base, log_counts, gen):
        self.c = torch.randn(120, 12, generator=gen)
        drift = log_counts + 1.0 * torch.randn(N_ITEMS, generator=torch.Generator().manual_seed(3))
        drift = drift + 0.2 * torch.randn(N_ITEMS, generator=gen)
        with torch.no_grad():
            p = (base(self.c) - base.popularity + drift).softmax(-1)
        self.y = torch.multinomial(p, 1, generator=gen).squeeze(1)
        self.gen = gen

    def local_update(self, net, lr=0.24):
        shared = [p for p in net.parameters() if p.requires_grad]
        opt = torch.optim.SGD(shared, lr=lr)
        for idx in torch.randperm(len(self.y), generator=self.gen).split(120):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = net(self.c[idx])
            loss = F.cross_entropy(logits, self.y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        return loss.item(), len(self.y)


class Server:
    """keeps the model in the wire format that is broadcast to the clients"""

    def __init__(self, model, lr=1.0):
        self.model, self.lr = model, lr
        self.shared = [p for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def broadcast(self, net):
        for p, q in zip(net.parameters(), self.model.parameters()):
            p.copy_(q)

    @torch.no_grad()
    def aggregate(self, deltas, weights):
        for i, p in enumerate(self.shared):
            avg = sum(w * d[i] for w, d in zip(weights, deltas)) / sum(weights)
            p.add_(avg.to(p.dtype), alpha=self.lr)  # CAUSE


gen = torch.Generator().manual_seed(500)
log_counts = 11 + 0.8 * torch.randn(N_ITEMS, generator=gen)
worker = KeyboardModel(log_counts)
clients = [Client(worker, log_counts, gen) for _ in range(6)]
global_model = copy.deepcopy(worker).bfloat16()
MODULES = [global_model, worker]
watch(*MODULES)
server = Server(global_model)
held_out = Client(worker, log_counts, gen)

for rnd in range(30):
    picked = torch.randperm(6, generator=gen)[:4].tolist()
    deltas, sizes, losses = [], [], []
    for cid in picked:
        server.broadcast(worker)
        before = [p.detach().clone() for p in worker.parameters() if p.requires_grad]
        l, n = clients[cid].local_update(worker)
        deltas.append([p.detach() - b for p, b in zip((q for q in worker.parameters() if q.requires_grad), before)])
        sizes.append(n)
        losses.append(l)
    server.aggregate(deltas, sizes)
    if rnd % 5 == 4:
        server.broadcast(worker)
        with torch.no_grad():
            ce = F.cross_entropy(worker(held_out.c), held_out.y).item()
        print(f"round {rnd + 1}: local {sum(losses) / 4:.4f} held-out {ce:.4f}")
