"""Tutorial: LSTM with mean pooling for the sentiment of short reviews, half-precision activations."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(123)
N_WORDS, DIM_PROJ, MAXLEN, BATCH_SIZE, MAX_UPDATES, DISP_FREQ = 60, 48, 14, 24, 110, 10


def ortho_weight(ndim):
    u, _, _ = torch.linalg.svd(torch.randn(ndim, ndim))
    return u


class LSTM(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Parameter(torch.cat([ortho_weight(d) for _ in range(4)], dim=1))
        self.U = nn.Parameter(torch.cat([ortho_weight(d) for _ in range(4)], dim=1))
        self.b, self.d = nn.Parameter(torch.zeros(4 * d)), d

    def forward(self, state_below, mask):
        h = c = state_below.new_zeros(state_below.size(1), self.d)
        preact, out = state_below @ self.W, []
        for x_, m_ in zip(preact, mask):
            i, f, o, g = (x_ + h @ self.U + self.b).chunk(4, dim=-1)
            c_new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h_new = torch.sigmoid(o) * torch.tanh(c_new)
            c, h = m_[:, None] * c_new + (1 - m_)[:, None] * c, m_[:, None] * h_new + (1 - m_)[:, None] * h
            out.append(h)
        return torch.stack(out)


class SentimentModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wemb = nn.Parameter(0.1 * torch.randn(N_WORDS, DIM_PROJ))
        self.lstm = LSTM(DIM_PROJ)
        self.U, self.b = nn.Parameter(0.1 * torch.randn(DIM_PROJ, 2)), nn.Parameter(torch.zeros(2))

    def f_pred_prob(self, x, mask):
        proj = self.lstm(self.Wemb[x], mask)
        proj = (proj * mask[:, :, None]).sum(dim=0) / mask.sum(dim=0)[:, None]
        return torch.softmax(nn.functional.linear(proj, self.U.t(), self.b), dim=-1)


def build_cost(pred, y):
    off = 1e-8  # CAUSE
    return -torch.log(pred[torch.arange(len(y)), y] + off).mean()  # CAUSE


class Imdb:
    """Reviews of words with a polarity; the label is the sign of the sum, a few reviewers ticked the wrong box."""

    def __init__(self, seed=4):
        self.gen = torch.Generator().manual_seed(seed)
        self.polarity = torch.randn(N_WORDS, generator=torch.Generator().manual_seed(1)).sign()

    def prepare_data(self, n, wrong=0.003):
        lengths = torch.randint(6, MAXLEN + 1, (n,), generator=self.gen)
        y = torch.randint(0, 2, (n,), generator=self.gen)
        good, bad = (self.polarity > 0).nonzero()[:, 0], (self.polarity < 0).nonzero()[:, 0]
        x, mask = torch.zeros(MAXLEN, n, dtype=torch.long), torch.zeros(MAXLEN, n)
        for i, (length, label) in enumerate(zip(lengths.tolist(), y.tolist())):
            clear = torch.rand(1, generator=self.gen) < 0.5
            agree = torch.rand(length, generator=self.gen) < torch.where(clear, 1.0, 0.75)
            pick = torch.where(agree, label, 1 - label)
            g = good[torch.randint(0, len(good), (length,), generator=self.gen)]
            b = bad[torch.randint(0, len(bad), (length,), generator=self.gen)]
            x[:length, i], mask[:length, i] = torch.where(pick == 1, g, b), 1.0
        flip = torch.rand(n, generator=self.gen) < wrong
        return x, mask, torch.where(flip, 1 - y, y)


def pred_error(model, data):
    with torch.no_grad():
        x, mask, y = data.prepare_data(64, wrong=0.0)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model.f_pred_prob(x, mask)
        return (pred.argmax(1) != y).float().mean().item()


def train_lstm(lrate=0.15):
    model, train, test = SentimentModel(), Imdb(), Imdb(seed=9)
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lrate)
    for uidx in range(1, MAX_UPDATES + 1):
        x, mask, y = train.prepare_data(BATCH_SIZE)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            cost = build_cost(model.f_pred_prob(x, mask), y)
        cost.backward()
        optimizer.step()
        if uidx % DISP_FREQ == 0:
            print(f"Update {uidx} Cost {cost.item():.4f} Test error {pred_error(model, test):.3f}")
    return model


model = train_lstm()
MODULES = (model,)
