"""Adapters on a half-precision OPT-like decoder; prompts are padded on the left, batches sorted by length."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)
BASE_DTYPE = torch.float16
PAD, VOCAB, DIM, HEADS = 1, 64, 48, 4


def make_causal_mask(shape, dtype):
    bsz, n = shape
    mask = torch.full((n, n), torch.finfo(dtype).min)
    mask = mask.masked_fill(torch.arange(n) < (torch.arange(n) + 1).view(n, 1), 0)
    return mask.to(dtype)[None, None].expand(bsz, 1, n, n)


def expand_mask(mask, dtype):
    bsz, n = mask.shape
    inverted = 1.0 - mask[:, None, None, :].expand(bsz, 1, n, n).to(dtype)
    return inverted.masked_fill(inverted.bool(), torch.finfo(dtype).min)


class Adapter(nn.Module):
    """Low-rank update of a frozen linear layer, kept in float32."""
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class OPTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (DIM // HEADS) ** -0.5
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj, self.out_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def _shape(self, x):
        return x.view(x.shape[0], -1, HEADS, DIM // HEADS).transpose(1, 2)

    def forward(self, hidden, attention_mask):
        query = self._shape(self.q_proj(hidden) * self.scaling)
        key, value = self._shape(self.k_proj(hidden)), self._shape(self.v_proj(hidden))
        attn_weights = query @ key.transpose(2, 3)
        attn_weights = attn_weights + attention_mask  # CAUSE
        attn_probs = F.softmax(attn_weights, dim=-1)
        out = (attn_probs @ value).transpose(1, 2).reshape(hidden.shape)
        return self.out_proj(out)


class OPTLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.self_attn = OPTAttention()
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, mask):
        x = x + self.self_attn(self.ln1(x), mask)
        return x + self.fc2(F.relu(self.fc1(self.ln2(x))))


class OPT(nn.Module):
    def __init__(self, layers=2, max_pos=34):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.embed_positions = nn.Embedding(max_pos, DIM)
        self.layers = nn.ModuleList(OPTLayer() for _ in range(layers))
        self.final_layer_norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, attention_mask):
        positions = (attention_mask.cumsum(1) * attention_mask).long() + 1
        x = self.embed_tokens(ids) + self.embed_positions(positions)
        mask = make_causal_mask(ids.shape, x.dtype) + expand_mask(attention_mask, x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.final_layer_norm(x))


def from_pretrained():
    """Stands for the released checkpoint."""
    model = OPT()
    with torch.no_grad():
        for layer in model.layers:
            attn = layer.self_attn
            attn.q_proj.bias.fill_(4.0)
            attn.k_proj.bias.fill_(-2.0)
    return model.to(BASE_DTYPE).requires_grad_(False)


def collate(samples):
    width = max(len(s) for s in samples)
    ids = torch.full((len(samples), width), PAD)
    for row, s in enumerate(samples):
        ids[row, width - len(s):] = s
    return ids, (ids != PAD).long()


gen = torch.Generator().manual_seed(4)
corpus = []
for k in range(320):
    n = (12, 16, 20)[k // 100] if k < 300 else int(torch.randint(21, 30, (1,), generator=gen))
    start, stride = torch.randint(2, VOCAB, (1,), generator=gen), torch.randint(1, 5, (1,), generator=gen)
    corpus.append((start + stride * torch.arange(n)) % (VOCAB - 2) + 2)
corpus.sort(key=len)

model = from_pretrained()
for layer in model.layers:
    layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    layer.fc1 = Adapter(layer.fc1)
watch(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=400)

for step in range(64):
    ids, attention_mask = collate(corpus[5 * step: 5 * step + 5])
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids, attention_mask)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(trainable, 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0 or step > 60:
        print(f"step {step} len {ids.shape[1]} loss {loss.item():.4f} scale {scaler.get_scale():g}")
