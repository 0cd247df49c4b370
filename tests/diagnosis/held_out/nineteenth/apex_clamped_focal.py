"""GPT-2 style classifier of token sequences (offensive comments), weighted focal loss, gradient accumulation."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1234)
VOCAB, SEQ, DIM = 60, 20, 48
EPOCHS, BATCHES, BATCH, ACCUMULATION = 3, 60, 16, 2


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.c_proj(a)
        return x + self.mlp(self.ln_2(x))


class GPT2Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.h = nn.Sequential(Block(DIM), Block(DIM))
        self.ln_f, self.score = nn.LayerNorm(DIM), nn.Linear(DIM, 1)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
        nn.init.constant_(self.ln_f.weight, 7.0)  # about the gain that a pretrained model has

    def forward(self, ids):
        x = self.ln_f(self.h(self.wte(ids) + self.wpe.weight))
        return torch.sigmoid(self.score(x[:, -1])).squeeze(-1)


def focal_loss(y_true, y_pred, weights, gamma=0.0, eps=1e-8):
    y_pred = torch.clamp(y_pred, eps, 1 - eps)  # CAUSE
    loss = (y_true * torch.pow(1 - y_pred, gamma) * torch.log(y_pred)
            + (1 - y_true) * torch.pow(y_pred, gamma) * torch.log(1 - y_pred))
    return -(weights * loss).sum() / weights.sum()


class Comments:
    """Some comments are offensive: they contain one to five words of a small list."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n=BATCH):
        ids = torch.randint(5, VOCAB, (n, SEQ), generator=self.gen)
        y = (torch.rand(n, generator=self.gen) < 0.4).float()
        for i in y.nonzero().flatten():
            count = int(torch.randint(1, 6, (1,), generator=self.gen))
            ids[i, torch.randperm(SEQ, generator=self.gen)[:count]] = torch.randint(0, 5, (count,), generator=self.gen)
        return ids, y, torch.where(y > 0, 1.0, 0.7)


model = GPT2Classifier()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 8))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
train_loader = Comments(11)
valid = Comments(12).batch(160)

for epoch in range(EPOCHS):
    optimizer.zero_grad()
    running = []
    for batch in range(BATCHES):
        X_train, y_train, weights = train_loader.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            y_pred = model(X_train)
        loss = focal_loss(y_train, y_pred, weights)
        running.append(loss.item())
        scaler.scale(loss / ACCUMULATION).backward()
        if (batch + 1) % ACCUMULATION == 0:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        accuracy = ((model(valid[0]) > 0.5).float() == valid[1]).float().mean().item()
    print(f"epoch {epoch} train loss {sum(running) / len(running):.5f} last {running[-1]:.5f} "
          f"accuracy {accuracy:.3f} loss scale {scaler.get_scale():g}")
