"""Semi-supervised node classification with symmetric normalisation; a ninth of the papers cite nothing and are not cited."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(51)

PAPERS, WORDS, TOPICS = 360, 48, 6


def citation_graph(seed=8):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (PAPERS,), generator=g)
    words = torch.rand(TOPICS, WORDS, generator=g).pow(2)
    x = (torch.rand(PAPERS, WORDS, generator=g) < 0.5 * words[topic]).float()
    same = topic[:, None] == topic[None]
    edge = torch.rand(PAPERS, PAPERS, generator=g) < torch.where(same, 0.03, 0.003)
    lonely = torch.arange(PAPERS) % 9 == 4
    edge[lonely] = False
    edge[:, lonely] = False
    edge = edge | edge.T
    edge.fill_diagonal_(False)
    return x, topic, edge.float()


def symmetric_norm(adj):
    degree = adj.sum(1)
    inv_sqrt = degree.pow(-0.5)
    inv_sqrt.masked_fill_(inv_sqrt == float("inf"), 0.0)
    return inv_sqrt[:, None] * adj * inv_sqrt[None]


def drop_edges(adj, p, g):
    keep = (torch.rand(adj.shape, generator=g) > p).float().triu()
    return adj * (keep + keep.T).clamp(max=1)


class GraphConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.neighbour, self.own = nn.Linear(i, o, bias=False), nn.Linear(i, o)

    def forward(self, x, a):
        return a @ self.neighbour(x) + self.own(x)


class GCN(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.first, self.second = GraphConv(WORDS, width), GraphConv(width, TOPICS)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, a):
        return self.second(self.drop(F.elu(self.first(x, a))), a)


x, topic, adj = citation_graph()
train = torch.arange(PAPERS) % 3 == 0
model = GCN()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 21, growth_interval=15)
edges = torch.Generator().manual_seed(3)

for epoch in range(90):
    model.train()
    with torch.autocast("cpu", dtype=torch.float16):
        a = symmetric_norm(drop_edges(adj, 0.4, edges).half())
        out = model(x, a)
    loss = F.cross_entropy(out[train].float(), topic[train])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if epoch % 10 == 9:
        model.eval()
        with torch.no_grad():
            hit = (model(x, symmetric_norm(adj)).argmax(1) == topic)[~train].float().mean()
        print(f"{epoch:3d} loss {loss.item():.4f} test accuracy {hit:.3f} scale {scaler.get_scale():g}")
