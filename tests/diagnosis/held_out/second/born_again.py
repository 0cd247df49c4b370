import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class TextCNN(nn.Module):
    def __init__(self, vocab=50, dim=24, n_cls=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList([nn.Conv1d(dim, 24, k, padding=k // 2) for k in (1, 3, 5)])
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(72, n_cls)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        h = torch.cat([F.relu(c(x)).amax(-1) for c in self.convs], 1)
        return self.fc(self.drop(h))


class SelfTraining:
    """pseudo labels from the current weights (no_grad), then a supervised + pseudo-label step"""

    def __init__(self, model, lr=4e-3, threshold=0.6):
        self.model, self.threshold = model, threshold
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, ids, y, unlabeled, noised):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                prob = self.model(unlabeled).float().softmax(-1)
                conf, pseudo = prob.max(-1)
            sup = F.cross_entropy(self.model(ids).float(), y)
            uns = F.cross_entropy(self.model(noised).float(), pseudo, reduction="none")
            loss = sup + ((conf > self.threshold) * uns).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), (conf > self.threshold).float().mean().item()


def sentences(gen, n, length=14):
    ids = torch.randint(0, 50, (n, length), generator=gen)
    y = torch.randint(0, 4, (n,), generator=gen)
    ids[torch.arange(n), torch.randint(0, length, (n,), generator=gen)] = 46 + y
    ids[ids >= 46] = ids[ids >= 46]
    keep = (ids < 46) | (ids == (46 + y)[:, None])
    return torch.where(keep, ids, ids - 46), y


def corrupt(ids, gen, p=0.1):
    noise = torch.randint(0, 46, ids.shape, generator=gen)
    return torch.where(torch.rand(ids.shape, generator=gen) < p, noise, ids)


torch.set_num_threads(1)
torch.manual_seed(71)
gen = torch.Generator().manual_seed(71)
model = TextCNN()
MODULES = [model]
watch(*MODULES)
st = SelfTraining(model)
test_ids, test_y = sentences(gen, 256)
for it in range(1, 81):
    ids, y = sentences(gen, 32)
    u, _ = sentences(gen, 32)
    loss, kept = st.step(ids, y, u, corrupt(u, gen))
    if it % 10 == 0:
        model.eval()
        with torch.no_grad():
            acc = (model(test_ids).argmax(-1) == test_y).float().mean().item()
        model.train()
        print(f"{it} loss {loss:.4f} kept {kept:.2f} acc {acc:.3f}")
