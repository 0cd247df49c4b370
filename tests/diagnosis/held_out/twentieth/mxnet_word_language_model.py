"""Word-level recurrent language model with truncated back-propagation, plain SGD with a large rate, clipped gradients, AMP."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(15738)


class args:
    emsize = nhid = 40
    lr = 5.0
    clip = 0.2
    epochs = 3
    batch_size = 16
    bptt = 12
    log_interval = 15
    vocab = 30


class Corpus:
    """A made-up language: each word has a few likely successors."""

    def __init__(self, length=7000, seed=1):
        gen = torch.Generator().manual_seed(seed)
        table = torch.softmax(2.2 * torch.randn(args.vocab, args.vocab, generator=gen), dim=1)
        words, w = [], 0
        for _ in range(length):
            w = int(torch.multinomial(table[w], 1, generator=gen))
            words.append(w)
        self.train = torch.tensor(words)


def batchify(data, batch_size):
    n = len(data) // batch_size
    return data[:n * batch_size].view(batch_size, n).t().contiguous()


class RNNModel(nn.Module):
    """Embedding, one LSTM layer written out, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(args.vocab, args.emsize)
        self.i2h, self.h2h = nn.Linear(args.emsize, 4 * args.nhid), nn.Linear(args.nhid, 4 * args.nhid, bias=False)
        self.decoder = nn.Linear(args.nhid, args.vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def begin_state(self, n):
        return torch.zeros(n, args.nhid), torch.zeros(n, args.nhid)

    def forward(self, inputs, hidden):
        h, c = hidden
        gates, output = self.i2h(self.encoder(inputs)), []
        for g in gates:
            i, f, o, u = (g + self.h2h(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(c)
            output.append(h)
        return self.decoder(torch.stack(output)), (h, c)


class Trainer:
    """Holds the optimizer and the loss scaler; step() rescales by the loss scale as AMP trainers do."""

    def __init__(self, params):
        self.params = list(params)
        self.optimizer = torch.optim.SGD(self.params, lr=args.lr)
        self._amp_loss_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=2000)

    def step(self):
        self._amp_loss_scaler.step(self.optimizer)
        self._amp_loss_scaler.update()


def clip_global_norm(arrays, max_norm):
    total = torch.sqrt(sum((a ** 2).sum() for a in arrays))
    if not torch.isfinite(total):
        return total
    for a in arrays:
        a.mul_(min(1.0, max_norm / (float(total) + 1e-8)))
    return total


def train(model, trainer, train_data):
    total = batches = 0
    for epoch in range(args.epochs):
        hidden = model.begin_state(args.batch_size)
        for ibatch, i in enumerate(range(0, len(train_data) - 1 - args.bptt, args.bptt)):
            data, target = train_data[i:i + args.bptt], train_data[i + 1:i + 1 + args.bptt]
            hidden = tuple(h.detach() for h in hidden)
            for p in trainer.params:
                p.grad = None
            with torch.autocast("cpu", dtype=torch.float16):
                output, hidden = model(data, hidden)
            loss = F.cross_entropy(output.float().flatten(0, 1), target.flatten())
            trainer._amp_loss_scaler.scale(loss).backward()
            grads = [p.grad for p in trainer.params]
            clip_global_norm(grads, args.clip)  # CAUSE
            trainer.step()
            total, batches = total + loss.item(), batches + 1
            if batches % args.log_interval == 0:
                cur = total / args.log_interval
                print(f"[Epoch {epoch} Batch {ibatch}] loss {cur:.2f}, ppl {math.exp(cur):.2f}, "
                      f"scale {trainer._amp_loss_scaler.get_scale():g}")
                total = 0


model = RNNModel()
watch(model)
train(model, Trainer(model.parameters()), batchify(Corpus().train, args.batch_size))

MODULES = (model,)
