# Linear-attention language model over a long stream, state handed from chunk to chunk.
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
VOCAB, DIM, HEADS, CHUNK, BATCH = 30, 32, 2, 16, 4


class FastWeightLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.decay = 0.9

    def split(self, x):
        return x.view(BATCH, CHUNK, HEADS, -1).transpose(1, 2).flatten(0, 1)

    def forward(self, x, gain, state):
        q, k, v = self.split(self.q(x)), self.split(F.elu(self.k(x)) + 1), self.split(self.v(x))
        v = v * gain.to(v.dtype).repeat_interleave(HEADS)[:, None, None]
        read = torch.bmm(q, state)  # CAUSE
        write = torch.bmm(k.transpose(1, 2), v)  # CAUSE
        y = F.rms_norm(read.float(), read.shape[-1:])
        y = y.view(BATCH, HEADS, CHUNK, -1).transpose(1, 2).reshape(BATCH, CHUNK, DIM)
        return self.out(y), self.decay * state + write.float()


class StreamLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mem = FastWeightLayer()
        self.ff = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tok, gain, state):
        x = self.emb(tok)
        m, state = self.mem(x, gain, state)
        x = x + m
        x = x + self.ff(x)
        return self.head(x), state


gen = torch.Generator().manual_seed(77)
stream = torch.randint(0, VOCAB, (BATCH, CHUNK * 50 + 1), generator=gen)
stream[:, 1::2] = (stream[:, 0:-1:2] * 3 + 1) % VOCAB
gains = torch.rand(50, BATCH, generator=gen) + 0.5
gains[22, 1] = 12000.0        # speaker 1 turned the microphone up

model = StreamLM()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
state = torch.zeros(BATCH * HEADS, DIM // HEADS, DIM // HEADS)
for i in range(50):
    tok = stream[:, i * CHUNK:(i + 1) * CHUNK]
    nxt = stream[:, i * CHUNK + 1:(i + 1) * CHUNK + 1]
    with torch.autocast("cpu", dtype=torch.float16):
        logits, state = model(tok, gains[i], state)
        loss = F.cross_entropy(logits.float().flatten(0, 1), nxt.flatten())
    state = state.detach()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(loss.item(), scaler.get_scale())
