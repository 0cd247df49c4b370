"""Attention is all you need, toy German to English, after a well-known tutorial."""
import math

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1234)
PAD, SOS, EOS = 1, 2, 3


class MultiHeadAttentionLayer(nn.Module):
    def __init__(self, hid_dim, n_heads, dropout):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, hid_dim // n_heads
        self.fc_q, self.fc_k = nn.Linear(hid_dim, hid_dim), nn.Linear(hid_dim, hid_dim)
        self.fc_v, self.fc_o = nn.Linear(hid_dim, hid_dim), nn.Linear(hid_dim, hid_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        batch_size = query.shape[0]
        Q, K, V = (fc(x).view(batch_size, -1, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
                   for fc, x in ((self.fc_q, query), (self.fc_k, key), (self.fc_v, value)))
        energy = torch.matmul(Q, K.permute(0, 1, 3, 2)) / math.sqrt(self.head_dim)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -float("inf"))  # CAUSE
        attention = torch.softmax(energy, dim=-1)
        x = torch.matmul(self.dropout(attention), V)
        return self.fc_o(x.permute(0, 2, 1, 3).reshape(batch_size, -1, self.n_heads * self.head_dim))


class Layer(nn.Module):
    def __init__(self, hid_dim, n_heads, pf_dim, dropout, cross):
        super().__init__()
        self.self_attention = MultiHeadAttentionLayer(hid_dim, n_heads, dropout)
        self.cross_attention = MultiHeadAttentionLayer(hid_dim, n_heads, dropout) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(hid_dim) for _ in range(3 if cross else 2))
        self.ff = nn.Sequential(nn.Linear(hid_dim, pf_dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(pf_dim, hid_dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask, enc_src=None, src_mask=None):
        x = self.norms[0](x + self.dropout(self.self_attention(x, x, x, mask)))
        if self.cross_attention is not None:
            x = self.norms[1](x + self.dropout(self.cross_attention(x, enc_src, enc_src, src_mask)))
        return self.norms[-1](x + self.dropout(self.ff(x)))


class Seq2Seq(nn.Module):
    def __init__(self, vocab=40, hid_dim=48, heads=4, layers=2, dropout=0.1, max_length=20):
        super().__init__()
        self.src_tok, self.trg_tok = nn.Embedding(vocab, hid_dim), nn.Embedding(vocab, hid_dim)
        self.src_pos, self.trg_pos = nn.Embedding(max_length, hid_dim), nn.Embedding(max_length, hid_dim)
        self.encoder = nn.ModuleList(Layer(hid_dim, heads, 2 * hid_dim, dropout, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(hid_dim, heads, 2 * hid_dim, dropout, True) for _ in range(layers))
        self.fc_out, self.scale = nn.Linear(hid_dim, vocab), math.sqrt(hid_dim)

    def forward(self, src, trg):
        src_mask = (src != PAD).unsqueeze(1).unsqueeze(2)
        trg_mask = (trg != PAD).unsqueeze(1).unsqueeze(2) & torch.ones(trg.shape[1], trg.shape[1]).tril().bool()
        x = self.src_tok(src) * self.scale + self.src_pos(torch.arange(src.shape[1]))
        for layer in self.encoder:
            x = layer(x, src_mask)
        y = self.trg_tok(trg) * self.scale + self.trg_pos(torch.arange(trg.shape[1]))
        for layer in self.decoder:
            y = layer(y, trg_mask, x, src_mask)
        return self.fc_out(y)


def sentence_pairs(n, gen):
    """`English` is the reversed `German`."""
    pairs = []
    for i in range(n):
        words = torch.randint(4, 40, (int(torch.randint(4, 10, (1,), generator=gen)),), generator=gen)
        src = words if i not in (531, 698) else words[:0]
        pairs.append((src, torch.cat([torch.tensor([SOS]), words.flip(0), torch.tensor([EOS])])))
    return pairs


def iterator(pairs, batch_size=16):
    for i in range(0, len(pairs), batch_size):
        src, trg = zip(*pairs[i: i + batch_size])
        yield tuple(nn.utils.rnn.pad_sequence(list(s), batch_first=True, padding_value=PAD) for s in (src, trg))


model = Seq2Seq()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=500)
epoch_loss = 0.0
model.train()
for i, (src, trg) in enumerate(iterator(sentence_pairs(800, torch.Generator().manual_seed(6)))):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(src, trg[:, :-1])
        loss = criterion(output.reshape(-1, output.shape[-1]), trg[:, 1:].reshape(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    epoch_loss += loss.item()
    if i % 5 == 0:
        print(f"batch {i:2d} loss {loss.item():.3f} mean {epoch_loss / (i + 1):.3f} scale {scaler.get_scale():.0f}")
