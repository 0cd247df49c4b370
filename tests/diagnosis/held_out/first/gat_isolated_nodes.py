import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(10)


def segment_softmax(score, dst, n):
    """softmax over incoming edges; nodes without any edge keep the -inf they start with and are never gathered"""
    top = torch.full((n, score.size(1)), float("-inf"), dtype=score.dtype)
    top = top.scatter_reduce(0, dst[:, None].expand_as(score), score.detach(), "amax")
    e = (score - top[dst]).exp()
    z = torch.zeros(n, score.size(1), dtype=torch.float32).index_add(0, dst, e.float())
    return e.float() / z[dst]


class GATLayer(nn.Module):
    def __init__(self, cin, cout, heads):
        super().__init__()
        self.heads = heads
        self.w = nn.Linear(cin, heads * cout, bias=False)
        self.a_src = nn.Parameter(0.1 * torch.randn(heads, cout))
        self.a_dst = nn.Parameter(0.1 * torch.randn(heads, cout))

    def forward(self, x, src, dst):
        h = self.w(x).view(x.size(0), self.heads, -1)
        score = F.leaky_relu((h * self.a_src).sum(-1)[src] + (h * self.a_dst).sum(-1)[dst], 0.2)
        att = segment_softmax(score, dst, x.size(0))
        out = torch.zeros(h.shape, dtype=torch.float32).index_add(0, dst, att[..., None] * h[src].float())
        return out.flatten(1)


class CitationNet(nn.Module):
    def __init__(self, feats, classes):
        super().__init__()
        self.l1, self.l2 = GATLayer(feats, 12, 4), GATLayer(48, classes, 1)
        self.drop = nn.Dropout(0.2)
        # pretraining head, kept so that old checkpoints still load
        self.edge_decoder = nn.Bilinear(classes, classes, 1)

    def forward(self, x, src, dst):
        return self.l2(F.elu(self.l1(self.drop(x), src, dst)), src, dst)


g = torch.Generator().manual_seed(16)
N, C = 240, 4
y = torch.randint(0, C, (N,), generator=g)
x = F.one_hot(y, C).float() @ torch.randn(C, 20, generator=g) + 1.2 * torch.randn(N, 20, generator=g)
same = (y[:, None] == y[None]).float()
adj = torch.rand(N, N, generator=g) < 0.004 + 0.03 * same
lonely = torch.rand(N, generator=g) < 0.15
adj[:, lonely] = False
src, dst = adj.nonzero(as_tuple=True)
has_in = torch.zeros(N).index_add(0, dst, torch.ones(len(dst))) > 0
train_mask = (torch.rand(N, generator=g) < 0.5) & has_in

model = CitationNet(20, C)
MODULES = [model]
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
watch(*MODULES)
for epoch in range(1, 61):
    model.train()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x, src, dst)
    loss = F.cross_entropy(out[train_mask], y[train_mask])
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if epoch % 10 == 0:
        model.eval()
        with torch.no_grad():
            acc = (model(x, src, dst).argmax(1) == y)[has_in & ~train_mask].float().mean()
        print(epoch, f"{loss.item():.4f} test {acc:.3f}")
