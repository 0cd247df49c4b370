"""Late-interaction retriever distilled from a cross-encoder's scores of a few candidates per query."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(239)


class ColBERT(nn.Module):
    def __init__(self, vocab=150, dim=48, out=32, heads=4):
        super().__init__()
        self.tokens, self.kind = nn.Embedding(vocab, dim), nn.Embedding(2, dim)
        self.layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True)
        self.dense = nn.Linear(dim, out, bias=False)

    def forward(self, ids, is_query):
        kind = self.kind(torch.tensor(int(is_query)))
        return F.normalize(self.dense(self.layer(self.tokens(ids) + kind)), p=2, dim=-1)


def colbert_kd_scores(queries, documents):
    """queries (b, q, d), documents (b, candidates, t, d): sum over query tokens of the best match."""
    return torch.einsum("bqd,bntd->bnqt", queries, documents).max(-1).values.sum(-1)


class Distillation(nn.Module):
    def __init__(self, model, normalize_scores=True, size_average=True):
        super().__init__()
        self.model, self.normalize_scores = model, normalize_scores
        self.loss_function = nn.KLDivLoss(reduction="batchmean" if size_average else "sum", log_target=True)

    def forward(self, query_ids, document_ids, labels):
        b, n, t = document_ids.shape
        queries = self.model(query_ids, True)
        documents = self.model(document_ids.view(b * n, t), False).view(b, n, t, -1)
        scores = colbert_kd_scores(queries, documents)
        if self.normalize_scores:
            max_scores, _ = torch.max(scores, dim=1, keepdim=True)
            min_scores, _ = torch.min(scores, dim=1, keepdim=True)
            epsilon = 1e-8
            scores = (scores - min_scores) / (max_scores - min_scores + epsilon)  # CAUSE
        return self.loss_function(F.log_softmax(scores.float(), -1), F.log_softmax(labels, -1))


class Collection:
    """Queries with four candidates each; a few passages were indexed several times."""

    def __init__(self, seed=2):
        self.gen = torch.Generator().manual_seed(seed)

    def group(self, duplicates):
        topic = int(torch.randint(0, 14, (1,), generator=self.gen)) * 10
        query = topic + torch.randint(0, 10, (6,), generator=self.gen)
        docs, scores = [], []
        for _ in range(4):
            share = torch.rand(1, generator=self.gen).item()
            doc = torch.randint(0, 150, (10,), generator=self.gen)
            topical = torch.rand(10, generator=self.gen) < share
            doc[topical] = topic + torch.randint(0, 10, (int(topical.sum()),), generator=self.gen)
            docs.append(doc)
            scores.append(topical.float().mean())
        if duplicates:
            docs, scores = [docs[0]] * 4, [scores[0]] * 4
        return query, torch.stack(docs), torch.stack(scores)

    def batch(self, step, size=8):
        groups = [self.group(duplicates=step in (26, 41, 42, 66) and i == 5) for i in range(size)]
        q, d, s = (torch.stack(part) for part in zip(*groups))
        return q, d, (s - s.amin(1, keepdim=True)) / (s.amax(1, keepdim=True) - s.amin(1, keepdim=True) + 1e-8)


def main(fp16=True, max_steps=80, learning_rate=1e-3, warmup=8):
    model = ColBERT()
    watch(model)
    train_loss = Distillation(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, (max_steps - s) / (max_steps - warmup)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=2000, enabled=fp16)
    data, seen = Collection(), []
    for step in range(max_steps):
        query, docs, labels = data.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = train_loss(query, docs, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if step % 10 == 9:
            print({"loss": round(sum(seen[-10:]) / 10, 4), "step": step + 1, "scale": scaler.get_scale()})


if __name__ == "__main__":
    main()
