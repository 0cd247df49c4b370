import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class FactorizationMachine(nn.Module):
    """second-order FM over a dense feature vector: 0.5 * sum_k ((xV)_k^2 - (x^2 V^2)_k)"""

    def __init__(self, n_features, k):
        super().__init__()
        self.linear = nn.Linear(n_features, 1)
        self.v = nn.Linear(n_features, k, bias=False)
        nn.init.normal_(self.v.weight, std=0.01)

    def forward(self, x):
        square_of_sum = self.v(x).pow(2)
        sum_of_square = F.linear(x.pow(2), self.v.weight.pow(2))  # CAUSE
        return self.linear(x) + 0.5 * (square_of_sum - sum_of_square).sum(1, keepdim=True)


class DeepFM(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.fm = FactorizationMachine(n_features, 8)
        self.bn = nn.BatchNorm1d(n_features)
        self.mlp = nn.Sequential(nn.Linear(n_features, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x):
        return (self.fm(x) + self.mlp(self.bn(x))).squeeze(1)


def impressions(n, gen):
    hist = torch.poisson(3 * torch.rand(n, 6, generator=gen), generator=gen)   # clicks in the last days
    ctx = (torch.rand(n, 10, generator=gen) < 0.3).float()
    x = torch.cat([hist, ctx], 1)
    logit = 0.25 * hist[:, 0] - 0.2 * hist[:, 1] + 1.5 * ctx[:, 0] * ctx[:, 1] - 0.6
    y = (torch.rand(n, generator=gen) < logit.sigmoid()).float()
    bots = torch.randint(0, n, (3,), generator=gen)
    x[bots, 0] = torch.tensor([310.0, 288.0, 402.0])                           # crawlers refreshing all day
    return x, y


def main():
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(1)
    x, y = impressions(2048, gen)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True, generator=gen)
    watch(*MODULES)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = 0
    for epoch in range(2):
        for xb, yb in loader:
            step += 1
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(xb)
                loss = F.binary_cross_entropy_with_logits(out, yb)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        model.eval()
        with torch.no_grad():
            auc_in = model(x)
            pos, neg = auc_in[y == 1], auc_in[y == 0]
            auc = (pos[:, None] > neg[None, :]).float().mean().item()
        model.train()
        print(f"epoch {epoch} last loss {loss.item():.4f} auc {auc:.3f} scale {scaler.get_scale()}")


torch.manual_seed(0)
model = DeepFM(16)
MODULES = [model]
main()
