"""Sentiment of short reviews with FreeLB: adversarial steps on the embeddings of a half-precision encoder."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(60)


class Encoder(nn.Module):
    def __init__(self, vocab=64, d=48, classes=2):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, d)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, d))
        self.layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(d, classes)
        nn.init.normal_(self.classifier.weight, std=0.5)

    def forward(self, inputs_embeds):
        return self.classifier(self.layer(inputs_embeds + self.position).mean(1))


class FreeLB:
    def __init__(self, adv_steps=2, adv_init_mag=1e-2, adv_lr=5e-2, adv_max_norm=0.3):
        self.steps, self.init_mag, self.lr, self.max_norm = adv_steps, adv_init_mag, adv_lr, adv_max_norm

    def attack(self, embeds, gen):
        delta = torch.zeros_like(embeds)
        delta.copy_(torch.rand(embeds.shape, generator=gen) * 2 - 1)
        return (delta * self.init_mag / embeds[0].numel() ** 0.5).requires_grad_()

    def update(self, delta):
        delta_grad = delta.grad.clone().detach()
        denorm = torch.norm(delta_grad.view(delta_grad.size(0), -1), dim=1).view(-1, 1, 1)  # CAUSE
        denorm = torch.clamp(denorm, min=1e-8)  # CAUSE
        new = (delta + self.lr * delta_grad / denorm).detach()  # CAUSE
        norm = torch.norm(new.view(new.size(0), -1).float(), dim=1)
        over = (norm > self.max_norm).to(new.dtype).view(-1, 1, 1)
        factor = (self.max_norm / norm.clamp(min=1e-6)).to(new.dtype).view(-1, 1, 1)
        return (new * (factor * over + 1 - over)).requires_grad_()


class FP16Optimizer:
    """Float32 master weights and a dynamic loss scale, as apex O2."""

    def __init__(self, params, lr, loss_scale=4096.0):
        self.params = list(params)
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.inner, self.loss_scale, self.skipped = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0), loss_scale, 0

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def step(self):
        overflow = not all(p.grad.isfinite().all() for p in self.params)
        for p, m in zip(self.params, self.master):
            m.grad = p.grad.float() / self.loss_scale
            p.grad = None
        if overflow:
            self.loss_scale, self.skipped = self.loss_scale / 2, self.skipped + 1
            return
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.params, self.master):
                p.copy_(m)


def reviews(gen, n=16):
    """Words 0-7 are bad, 8-15 are good, the rest says nothing."""
    y = torch.randint(0, 2, (n,), generator=gen)
    ids = torch.randint(16, 64, (n, 16), generator=gen)
    for k in range(10):
        ids[torch.arange(n), torch.randint(0, 16, (n,), generator=gen)] = 8 * y + torch.randint(0, 8, (n,), generator=gen)
    return ids, y


model = Encoder().half()
watch(model)
optimizer, freelb = FP16Optimizer(model.parameters(), lr=8e-3), FreeLB()
gen = torch.Generator().manual_seed(61)
for step in range(100):
    ids, y = reviews(gen)
    delta = freelb.attack(model.word_embeddings(ids).detach(), gen)
    for astep in range(freelb.steps):
        embeds = model.word_embeddings(ids) + delta
        loss = F.cross_entropy(model(embeds).float(), y) / freelb.steps
        optimizer.backward(loss)
        if astep < freelb.steps - 1:
            delta = freelb.update(delta)
    optimizer.step()
    if step % 10 == 0 or step == 99:
        print(f"step {step} loss {loss.item() * freelb.steps:.7f} loss scale {optimizer.loss_scale:g} skipped {optimizer.skipped}")
