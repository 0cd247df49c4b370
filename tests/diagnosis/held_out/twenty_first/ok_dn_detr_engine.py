"""Set prediction with denoising queries on small scenes (DN-DETR style engine)."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(18)
CLASSES, OBJECTS, QUERIES, DIM, TOKENS = 3, 3, 5, 48, 12


class DecoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.kv, self.out, self.qkv, self.self_out = (nn.Linear(d, n * d) for n in (1, 2, 1, 3, 1))
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    @staticmethod
    def attend(q, k, v, mask=None):
        split = lambda x: x.view(x.size(0), x.size(1), 4, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, tgt, memory, mask):
        tgt = self.n1(tgt + self.self_out(self.attend(*self.qkv(tgt).chunk(3, -1), mask)))
        tgt = self.n2(tgt + self.out(self.attend(self.q(tgt), *self.kv(memory).chunk(2, -1))))
        return self.n3(tgt + self.ffn(tgt))


class DNDETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_proj, self.label_enc = nn.Linear(6, DIM), nn.Embedding(CLASSES, DIM)
        self.query, self.box_enc = nn.Parameter(0.5 * torch.randn(QUERIES, DIM)), nn.Linear(2, DIM)
        self.decoder = nn.ModuleList((DecoderLayer(DIM), DecoderLayer(DIM)))
        self.class_embed, self.bbox_embed = nn.Linear(DIM, CLASSES + 1), nn.Linear(DIM, 2)
        mask = torch.ones(QUERIES + OBJECTS, QUERIES + OBJECTS, dtype=torch.bool)
        mask[:QUERIES, QUERIES:] = False
        self.register_buffer("attn_mask", mask)

    def forward(self, tokens, dn_labels, dn_boxes):
        dn = self.label_enc(dn_labels) + self.box_enc(dn_boxes)
        tgt, memory = torch.cat((self.query.expand(len(tokens), -1, -1).to(dn.dtype), dn), 1), self.input_proj(tokens)
        for layer in self.decoder:
            tgt = layer(tgt, memory, self.attn_mask)
        return self.class_embed(tgt).float(), self.bbox_embed(tgt).float()


def scenes(gen, n=12):
    """Three objects in the unit square among tokens without an object."""
    boxes, labels = torch.rand(n, OBJECTS, 2, generator=gen), torch.randint(0, CLASSES, (n, OBJECTS), generator=gen)
    tokens = torch.zeros(n, TOKENS, 6)
    tokens[:, :OBJECTS] = torch.cat((boxes, F.one_hot(labels, CLASSES), torch.ones(n, OBJECTS, 1)), -1)
    order = torch.rand(n, TOKENS, generator=gen).argsort(1)[..., None].expand(-1, -1, 6)
    return tokens.gather(1, order) + 0.02 * torch.randn(n, TOKENS, 6, generator=gen), labels, boxes


def criterion(logits, boxes, labels, gt):
    cost = torch.cdist(boxes[:, :QUERIES].detach(), gt) - 0.5 * logits[:, :QUERIES].detach().softmax(-1).gather(
        2, labels[:, None].expand(-1, QUERIES, -1))
    orders = torch.tensor(list(itertools.permutations(range(QUERIES), OBJECTS)))
    total = cost[:, orders, torch.arange(OBJECTS)].sum(-1)
    match = orders[total.argmin(1)]
    target = torch.full((len(gt), QUERIES), CLASSES).scatter_(1, match, labels)
    matched = boxes.gather(1, match[..., None].expand(-1, -1, 2))
    ce = F.cross_entropy(logits[:, :QUERIES].flatten(0, 1), target.flatten())
    dn = F.cross_entropy(logits[:, QUERIES:].flatten(0, 1), labels.flatten()) + 5 * F.l1_loss(boxes[:, QUERIES:], gt)
    return ce + 5 * F.l1_loss(matched, gt) + dn


def train_one_epoch(model, optimizer, scaler, gen, epoch, max_norm=0.1, iterations=15):
    for _ in range(iterations):
        tokens, labels, gt = scenes(gen)
        noisy = gt + 0.1 * torch.randn(gt.shape, generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(tokens, labels, noisy)
        losses_sum = criterion(*outputs, labels, gt)
        optimizer.zero_grad()
        scaler.scale(losses_sum).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(losses_sum.item())
    print(f"Epoch: [{epoch}] loss: {sum(losses[-iterations:]) / iterations:.4f} scale: {scaler.get_scale():g}")


losses = []
model = DNDETR()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
scaler, gen = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16), torch.Generator().manual_seed(3)
for epoch in range(5):
    train_one_epoch(model, optimizer, scaler, gen, epoch)
MODULES = (model,)
