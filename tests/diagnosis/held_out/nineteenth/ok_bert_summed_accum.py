"""BERT-style pre-training (masked words, next sentence): micro-batch losses are not divided, the summed gradients are."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1112)
VOCAB, DIM, SEQ, MASK, SEP = 40, 48, 20, 1, 2
ACCUMULATION, UPDATES, MICRO = 4, 60, 8


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.out, self.ln1, self.ln2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class BertForPreTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.pos, self.seg = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM), nn.Embedding(2, DIM)
        self.encoder = nn.Sequential(Layer(DIM), Layer(DIM))
        self.mlm, self.nsp = nn.Linear(DIM, VOCAB), nn.Linear(DIM, 2)
        for m in self.modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=0.1)

    def forward(self, ids, segments):
        h = self.encoder(self.word(ids) + self.pos.weight + self.seg(segments))
        return self.mlm(h), self.nsp(h[:, 0])


class BertPretrainingCriterion(nn.Module):
    def forward(self, prediction_scores, seq_relationship, masked_lm_labels, next_sentence_labels):
        masked = F.cross_entropy(prediction_scores.float().flatten(0, 1), masked_lm_labels.flatten(), ignore_index=-1)
        return masked + F.cross_entropy(seq_relationship.float(), next_sentence_labels)


def make_batch(gen, n=MICRO):
    """Two sentences that count on from a word; the second one continues the first or starts anywhere."""
    half = SEQ // 2 - 1
    start = torch.randint(0, VOCAB - 3, (n, 1), generator=gen)
    is_next = torch.randint(0, 2, (n,), generator=gen)
    other = torch.randint(0, VOCAB - 3, (n, 1), generator=gen)
    second = torch.where(is_next[:, None] == 1, start + half, other)
    first = 3 + (start + torch.arange(half)) % (VOCAB - 3)
    second = 3 + (second + torch.arange(half)) % (VOCAB - 3)
    sep = torch.full((n, 1), SEP)
    ids, segments = torch.cat((sep, first, sep, second), 1), torch.cat((torch.zeros(half + 1), torch.ones(half + 1))).long()
    masked = (torch.rand(ids.shape, generator=gen) < 0.2) & (ids != SEP)
    labels = torch.where(masked, ids, -1)
    return torch.where(masked, MASK, ids), segments.expand(n, -1), labels, is_next


def take_optimizer_step(args_accumulation, optimizer, model, scaler):
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.div_(args_accumulation)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


model, criterion = BertForPreTraining(), BertPretrainingCriterion()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 17, growth_interval=20)
gen = torch.Generator().manual_seed(1)
average_loss, training_steps = 0.0, 0

for global_step in range(UPDATES):
    for _ in range(ACCUMULATION):
        training_steps += 1
        ids, segments, labels, is_next = make_batch(gen)
        with torch.autocast("cpu", dtype=torch.float16):
            scores, relation = model(ids, segments)
            loss = criterion(scores, relation, labels, is_next)
        scaler.scale(loss).backward()
        average_loss += loss.item()
    take_optimizer_step(ACCUMULATION, optimizer, model, scaler)
    if (global_step + 1) % 5 == 0:
        print(f"training_steps {training_steps} average_loss {average_loss / (5 * ACCUMULATION):.4f} "
              f"step_loss {loss.item():.4f} loss_scale {scaler.get_scale():g}")
        average_loss = 0.0
