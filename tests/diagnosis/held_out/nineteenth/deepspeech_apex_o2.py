"""CTC speech recogniser on synthetic spectrograms: half model with float32 masters, dynamic loss scale, gradient clipping."""
import contextlib
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(123456)
LABELS = "_abcdefgh "
FREQ, HIDDEN = 16, 48


class HalfWithMasters:
    """Level O2: the model is half (batch norm excepted), the optimizer owns float32 copies of its parameters."""

    def __init__(self, model, make_optimizer, loss_scale=2.0 ** 12, window=200):
        self.model = model.half()
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.float()
        self.params = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer, self.scale, self.window, self.unskipped = make_optimizer(self.masters), loss_scale, window, 0

    def master_params(self):
        return iter(self.masters)

    @contextlib.contextmanager
    def scale_loss(self, loss):
        yield loss.float() * self.scale
        for m, p in zip(self.masters, self.params):
            m.grad = p.grad.float() / self.scale
        self.overflow = not all(torch.isfinite(m.grad).all() for m in self.masters)
        self.unskipped = 0 if self.overflow else self.unskipped + 1
        if self.overflow:
            self.scale /= 2
            print(f"Gradient overflow. Skipping step, reducing loss scale to {self.scale}")
        elif self.unskipped % self.window == 0:
            self.scale *= 2

    @torch.no_grad()
    def step(self):
        if not self.overflow:
            self.optimizer.step()
            for m, p in zip(self.masters, self.params):
                p.copy_(m)

    def zero_grad(self):
        for p in (*self.params, *self.masters):
            p.grad = None


class BatchRNN(nn.Module):
    def __init__(self, d_in, d):
        super().__init__()
        self.norm, self.inp, self.rec = nn.BatchNorm1d(d_in), nn.Linear(d_in, d), nn.Linear(d, d, bias=False)
        nn.init.orthogonal_(self.rec.weight)

    def forward(self, x):
        t, n, d = x.shape
        x = self.inp(self.norm(x.float().reshape(t * n, d)).view(t, n, d).to(x.dtype))
        h, out = torch.zeros_like(x[0]), []
        for frame in x:
            h = F.hardtanh(frame + self.rec(h), 0, 20)
            out.append(h)
        return torch.stack(out)


class DeepSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(3 * FREQ, HIDDEN)
        self.rnns = nn.ModuleList(BatchRNN(HIDDEN, HIDDEN) for _ in range(2))
        self.fc = nn.Linear(HIDDEN, len(LABELS))

    def forward(self, spect):
        x = F.pad(spect, (0, 0, 1, 1))
        x = torch.cat((x[:, :-2], x[:, 1:-1], x[:, 2:]), -1).to(self.conv.weight.dtype)
        x = F.hardtanh(self.conv(x), 0, 20).transpose(0, 1)
        for rnn in self.rnns:
            x = rnn(x)
        return self.fc(x)


def utterances(gen, n=8):
    shapes = torch.randn(len(LABELS), FREQ, generator=torch.Generator().manual_seed(9))
    inputs, targets, sizes, target_sizes = torch.zeros(n, 40, FREQ), [], [], []
    for i in range(n):
        text = torch.randint(1, len(LABELS), (int(torch.randint(5, 11, (1,), generator=gen)),), generator=gen)
        frames = torch.cat([shapes[c].expand(int(torch.randint(2, 5, (1,), generator=gen)), -1) for c in text])[:40]
        frames = frames + 0.3 * torch.randn(frames.shape, generator=gen)
        inputs[i, :len(frames)] = (frames - frames.mean()) / frames.std()
        targets.append(text), sizes.append(len(frames)), target_sizes.append(len(text))
    return inputs, torch.cat(targets), torch.tensor(sizes), torch.tensor(target_sizes)


def train(args_max_norm=4.0, lr=0.03, iters=70):
    model = DeepSpeech()
    watch(model)
    amp = HalfWithMasters(model, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True))
    gen = torch.Generator().manual_seed(1)
    avg_loss = 0.0
    for i in range(iters):
        inputs, targets, sizes, target_sizes = utterances(gen)
        out = model(inputs)
        loss = F.ctc_loss(F.log_softmax(out.float(), -1), targets, sizes, target_sizes, reduction="sum")
        loss = loss / inputs.size(0)
        loss_value = loss.item()
        if loss_value == float("inf"):
            print("WARNING: received an inf loss, setting loss value to 0")
            loss_value = 0
        avg_loss += loss_value
        amp.zero_grad()
        with amp.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args_max_norm)  # CAUSE
        amp.step()
        if (i + 1) % 7 == 0:
            print(f"Epoch: [{(i + 1) // 7}/10]\tLoss {loss_value:.4f} ({avg_loss / (i + 1):.4f})")


train()
