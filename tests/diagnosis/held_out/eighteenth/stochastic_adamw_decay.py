"""Fine-tuning a small denoiser whose weights are bf16, with AdamW that rounds its updates stochastically."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(107)


def copy_stochastic_(target, source):
    """Rounds float32 to bf16 up or down, with probabilities by the distance."""
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32)
    bits = (source.float().view(torch.int32) + noise).bitwise_and_(-65536)
    target.copy_(bits.view(torch.float32))


def addcdiv_stochastic_(param, tensor1, tensor2, value):
    copy_stochastic_(param, param.float().addcdiv_(tensor1, tensor2, value=value))


class AdamWStochastic(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            lr, weight_decay = group["lr"], group["weight_decay"]
            for param in group["params"]:
                grad, state = param.grad.float(), self.state[param]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["step"] += 1
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                # Perform stepweight decay
                param.mul_(1 - lr * weight_decay)  # CAUSE
                exp_avg.lerp_(grad, 1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                step_size = lr / (1 - beta1 ** state["step"])
                denom = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
                if param.dtype == torch.bfloat16:
                    addcdiv_stochastic_(param, exp_avg, denom, value=-step_size)
                else:
                    param.addcdiv_(exp_avg, denom, value=-step_size)


class Denoiser(nn.Module):
    def __init__(self, dim=16, d=96, tags=32):
        super().__init__()
        self.tags = nn.Embedding(tags, d)
        self.inp, self.time = nn.Linear(dim, d), nn.Linear(8, d)
        self.hidden, self.out = nn.Linear(d, d), nn.Linear(d, dim)

    def forward(self, x, t, tag):
        freq = 2.0 ** torch.arange(4)
        emb = torch.cat([torch.sin(t[:, None] * freq), torch.cos(t[:, None] * freq)], -1).to(x.dtype)
        h = F.silu(self.inp(x) + self.time(emb) + self.tags(tag))
        return self.out(F.silu(self.hidden(h)))


gen = torch.Generator().manual_seed(108)
centres = torch.randn(32, 16, generator=gen)
train_tag = torch.randint(0, 12, (32,), generator=gen)  # the concepts of this run use 12 of the 32 tags
train_set = centres[train_tag] + 0.7 * torch.randn(32, 16, generator=gen)
valid_tag = torch.randint(0, 12, (256,), generator=gen)
valid_set = centres[valid_tag] + 0.7 * torch.randn(256, 16, generator=gen)


def loss_of(model, x0, tag, g):
    t, noise = torch.rand(len(x0), generator=g), torch.randn(x0.shape, generator=g)
    x = torch.cos(t[:, None] * math.pi / 2) * x0 + torch.sin(t[:, None] * math.pi / 2) * noise
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x.to(torch.bfloat16), t, tag)
    return F.mse_loss(pred.float(), noise)


model = Denoiser().to(torch.bfloat16)
watch(model)
optimizer = AdamWStochastic(model.parameters(), lr=2e-3, weight_decay=0.8)


def report(step):
    norm = math.sqrt(sum(p.float().pow(2).sum().item() for p in model.parameters()))
    unused = model.tags.weight[12:].float().norm().item()
    with torch.no_grad():
        valid = loss_of(model, valid_set, valid_tag, torch.Generator().manual_seed(9)).item()
    print(f"step {step} validation {valid:.4f} weight norm {norm:.4f} norm of the unused tags {unused:.6f}")


report(0)
for step in range(1, 101):
    optimizer.zero_grad()
    loss = loss_of(model, train_set, train_tag, gen)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        report(step)
