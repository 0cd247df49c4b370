"""Sentence classifier: gated CNN over embeddings, attentive pooling with masked padding, per-sentence segments."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(93)
PAD = 0


class GatedConv(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.conv = nn.Conv1d(dim, 2 * dim, width, padding=width // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask):
        y = F.glu(self.conv((x * mask.unsqueeze(-1)).transpose(1, 2)), dim=1).transpose(1, 2)
        return self.norm(x + y)


def masked_softmax(scores, mask):
    """Softmax over the positions where mask is one."""
    scores = scores + (1 - mask.to(scores.dtype)) * -1e15  # CAUSE
    return torch.softmax(scores, dim=-1)


class AttentivePool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, x, mask):
        weights = masked_softmax(self.score(x).squeeze(-1), mask)
        return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


class SegmentClassifier(nn.Module):
    """Each document has up to `segments` sentences; every sentence is pooled, then the document."""

    def __init__(self, vocab=90, dim=32, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.convs = nn.ModuleList([GatedConv(dim, 3), GatedConv(dim, 5)])
        self.words, self.sentences = AttentivePool(dim), AttentivePool(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, docs):
        b, s, t = docs.shape
        flat = docs.reshape(b * s, t)
        mask = (flat != PAD).float()
        x = self.embed(flat)
        for conv in self.convs:
            x = conv(x, mask)
        sent = self.words(x, mask).view(b, s, -1)
        return self.out(self.sentences(sent, (mask.view(b, s, t).sum(-1) > 0).float()))


class ReviewLoader:
    def __init__(self, n_batches, batch=8, max_segments=4, length=12, seed=5):
        self.n, self.batch, self.segments, self.length = n_batches, batch, max_segments, length
        self.gen = torch.Generator().manual_seed(seed)

    def document(self, label, segments):
        doc = torch.full((self.segments, self.length), PAD)
        for k in range(segments):
            n = int(torch.randint(4, self.length + 1, (1,), generator=self.gen))
            words = torch.randint(1, 90, (n,), generator=self.gen)
            topical = torch.rand(n, generator=self.gen) < 0.35
            words[topical] = 1 + 5 * label + torch.randint(0, 5, (int(topical.sum()),), generator=self.gen)
            doc[k, :n] = words
        return doc

    def __iter__(self):
        for index in range(self.n):
            labels = torch.randint(0, 4, (self.batch,), generator=self.gen)
            counts = torch.full((self.batch,), self.segments)
            if index in (29, 30, 47, 63):  # short reviews
                counts[3] = 2
            yield torch.stack([self.document(int(y), int(c)) for y, c in zip(labels, counts)]), labels


def train(model, loader, lr=3e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2000)
    for step, (docs, labels) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(docs)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            acc = (logits.argmax(-1) == labels).float().mean()
            print(f"step {step:2d} loss {loss.item():.3f} acc {acc:.2f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    net = SegmentClassifier()
    watch(net)
    train(net, ReviewLoader(70))
