"""Graph auto-encoder for link prediction on a small co-author graph, half precision."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2106)
EPS = 1e-15  # CAUSE
NODES, FEATURES, COMMUNITIES = 96, 40, 6


def coauthor_graph(seed=3):
    """Researchers of six fields who publish mostly with their own field, with word counts as features; test links are held out."""
    gen = torch.Generator().manual_seed(seed)
    field = torch.randint(0, COMMUNITIES, (NODES,), generator=gen)
    prob = torch.where(field[:, None] == field[None, :], 0.9, 0.01)
    upper = torch.triu(torch.rand(NODES, NODES, generator=gen) < prob, diagonal=1)
    links = upper.nonzero().t()
    links = links[:, torch.randperm(links.size(1), generator=gen)]
    words = torch.rand(COMMUNITIES, FEATURES, generator=gen) ** 2
    length = torch.where(torch.rand(NODES, 1, generator=gen) < 0.06, 10.0, 2.0)  # a few write much
    x = torch.poisson(length * words[field], generator=gen)
    n_test = links.size(1) // 10
    return x, links[:, n_test:], links[:, :n_test], upper | upper.t()


def gcn_norm(edges):
    adj = torch.eye(NODES)
    adj[edges[0], edges[1]] = adj[edges[1], edges[0]] = 1.0
    deg = adj.sum(1)
    return adj / torch.sqrt(deg[:, None] * deg[None, :])


def negative_sampling(known, n, gen):
    out = []
    while len(out) < n:
        i, j = torch.randint(0, NODES, (2,), generator=gen).tolist()
        if i != j and not known[i, j]:
            out.append((i, j))
    return torch.tensor(out).t()


class GCNConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin, self.bias = nn.Linear(d_in, d_out, bias=False), nn.Parameter(torch.zeros(d_out))

    def forward(self, x, adj):
        out = adj @ self.lin(x)
        out += self.bias
        return out


class GCNEncoder(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(d_in, 2 * d_out), GCNConv(2 * d_out, d_out)

    def forward(self, x, adj):
        return self.conv2(torch.relu(self.conv1(x, adj)), adj)


class InnerProductDecoder(nn.Module):
    def forward(self, z, edge_index, sigmoid=True):
        value = (z[edge_index[0]] * z[edge_index[1]]).sum(dim=1)
        return torch.sigmoid(value) if sigmoid else value


class GAE(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.decoder = encoder, InnerProductDecoder()

    def encode(self, *args):
        return self.encoder(*args)

    def recon_loss(self, z, pos_edge_index, neg_edge_index):
        pos_loss = -torch.log(self.decoder(z, pos_edge_index) + EPS).mean()
        neg_loss = -torch.log(1 - self.decoder(z, neg_edge_index) + EPS).mean()  # CAUSE
        return pos_loss + neg_loss

    def test(self, z, pos, neg):
        scores = torch.cat((self.decoder(z, pos, sigmoid=False), self.decoder(z, neg, sigmoid=False))).float()
        n = pos.size(1)
        wins = (scores[:n, None] > scores[None, n:]).float() + 0.5 * (scores[:n, None] == scores[None, n:]).float()
        return wins.mean().item()


x, train_pos, test_pos, known = coauthor_graph()
adj, gen = gcn_norm(train_pos), torch.Generator().manual_seed(4)
test_neg = negative_sampling(known, test_pos.size(1), gen)
model = GAE(GCNEncoder(FEATURES, 16))
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)


def train():
    model.train()
    optimizer.zero_grad()
    neg = negative_sampling(adj > 0, train_pos.size(1), gen)
    with torch.autocast("cpu", dtype=torch.float16):
        z = model.encode(x, adj)
        loss = model.recon_loss(z, train_pos, neg)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    with torch.autocast("cpu", dtype=torch.float16):
        return model.test(model.encode(x, adj), test_pos, test_neg)


for epoch in range(1, 101):
    loss = train()
    if epoch % 10 == 0:
        print(f"Epoch: {epoch:03d}, loss {loss:.4f}, AUC: {test():.4f}, scale {scaler.get_scale():g}")
