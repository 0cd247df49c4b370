"""Intent classifier in half precision (master weights, dynamic loss scale); probabilities are needed by the report."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(111)
VOCAB, INTENTS, LENGTH = 120, 8, 12


class IntentNet(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.words = nn.Embedding(VOCAB, d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.hidden, self.out = nn.Linear(d, d), nn.Linear(d, INTENTS)

    def forward(self, ids):
        h = torch.relu(self.conv(self.words(ids).transpose(1, 2))).amax(-1)
        return torch.softmax(self.out(torch.relu(self.hidden(h))), dim=-1)


class FP16_Optimizer:
    """Half gradients are copied to float32 masters; the scale halves on overflow and doubles after a while."""

    def __init__(self, optimizer, init_scale=2.0 ** 10, scale_window=200):
        self.optimizer, self.loss_scale, self.scale_window, self.good = optimizer, init_scale, scale_window, 0
        self.fp16 = [p for group in optimizer.param_groups for p in group["params"]]
        self.fp32 = [p.detach().clone().float() for p in self.fp16]
        optimizer.param_groups[0]["params"] = self.fp32

    def zero_grad(self):
        for p in self.fp16:
            p.grad = None

    def backward(self, loss):
        (loss.float() * self.loss_scale).backward()

    def step(self):
        norm = sum(p.grad.float().pow(2).sum() for p in self.fp16) ** 0.5
        if not torch.isfinite(norm):
            self.loss_scale, self.good = self.loss_scale / 2, 0
            return False
        for master, p in zip(self.fp32, self.fp16):
            master.grad = p.grad.float() / self.loss_scale
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.fp32, self.fp16):
                p.copy_(master)
        self.good += 1
        if self.good % self.scale_window == 0:
            self.loss_scale *= 2
        return True


class Utterances:
    """Every intent has its own words; annotators mix up a few labels."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n=32, confused=0.04):
        intent = torch.randint(0, INTENTS, (n,), generator=self.gen)
        filler = torch.randint(INTENTS * 8, VOCAB, (n, LENGTH), generator=self.gen)
        own = intent[:, None] * 8 + torch.randint(0, 8, (n, LENGTH), generator=self.gen)
        ids = torch.where(torch.rand(n, LENGTH, generator=self.gen) < 0.4, own, filler)
        wrong = torch.rand(n, generator=self.gen) < confused
        label = torch.where(wrong, (intent + 1) % INTENTS, intent)
        return ids, label, intent


data = Utterances(112)
model = IntentNet()
watch(model)
model.half()
optimizer = FP16_Optimizer(torch.optim.Adam(model.parameters(), lr=5e-3))
criterion = nn.NLLLoss()
skipped = 0
for step in range(100):
    ids, label, intent = data.batch()
    probabilities = model(ids)
    loss = criterion(torch.log(probabilities), label)  # CAUSE
    optimizer.zero_grad()
    optimizer.backward(loss)
    if not optimizer.step():
        skipped += 1
        if skipped % 8 == 1:
            print(f"step {step}: OVERFLOW! Skipping step. Attempted loss scale now {optimizer.loss_scale:g}")
    if step % 10 == 0 or step == 99:
        accuracy = (probabilities.argmax(-1) == intent).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} accuracy {accuracy:.3f} confidence {probabilities.amax(-1).float().mean().item():.4f} skipped {skipped}")
