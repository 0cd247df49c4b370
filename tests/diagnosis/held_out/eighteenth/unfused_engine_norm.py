"""Masked language model in fp16 with LAMB, driven by an engine that wraps the optimizer (fp32 masters, dynamic scale)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(103)
VOCAB, SEQ, MASK = 48, 24, 0


class Layer(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Bert(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCAB, d), nn.Embedding(SEQ, d)
        self.layers = nn.Sequential(Layer(d), Layer(d))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        return self.head(self.layers(self.word(ids) + self.position.weight))


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=4e-2, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["step"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["step"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].lerp_(p.grad ** 2, 1 - b2)
                u = (s["m"] / (1 - b1 ** s["step"])) / ((s["v"] / (1 - b2 ** s["step"])).sqrt() + group["eps"])
                ratio = (p.norm() / u.norm().clamp(min=1e-8)).clamp(0.1, 10) if p.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * u)


class FP16UnfusedOptimizer:
    def __init__(self, init_optimizer, initial_scale_power=16, scale_window=40, min_scale=1.0, clip_grad=1.0):
        self.optimizer, self.clip_grad = init_optimizer, clip_grad
        self.cur_scale, self.scale_window, self.min_scale = 2.0 ** initial_scale_power, scale_window, min_scale
        self.cur_iter, self.last_overflow, self.skipped = 0, -1, 0
        self.fp16_groups, self.fp32_groups = [], []
        for group in self.optimizer.param_groups:
            self.fp16_groups.append(group["params"])
            self.fp32_groups.append([p.detach().clone().float() for p in group["params"]])
            group["params"] = self.fp32_groups[-1]
        self._global_grad_norm = 0.0

    def backward(self, loss):
        (loss.float() * self.cur_scale).backward()

    def step(self):
        grads = [p.grad for group in self.fp16_groups for p in group]
        overflow = not all(torch.isfinite(g).all() for g in grads)
        scale = self.cur_scale
        self._update_scale(overflow)
        if overflow:
            self.skipped += 1
            return self.zero_grad()
        norm_groups = [sum(p.grad.float().pow(2).sum() for p in group) ** 0.5 for group in self.fp16_groups]
        self._global_grad_norm = float(sum(n ** 2 for n in norm_groups) ** 0.5)  # CAUSE
        for fp16, fp32 in zip(self.fp16_groups, self.fp32_groups):
            for p16, p32 in zip(fp16, fp32):
                p32.grad = p16.grad.float()
        self.unscale_and_clip_grads(self._global_grad_norm, scale)
        self.optimizer.step()
        with torch.no_grad():
            for fp16, fp32 in zip(self.fp16_groups, self.fp32_groups):
                for p16, p32 in zip(fp16, fp32):
                    p16.copy_(p32)
        self.zero_grad()

    def unscale_and_clip_grads(self, total_norm, scale):
        clip = ((total_norm / scale) + 1e-6) / self.clip_grad
        for group in self.fp32_groups:
            for p in group:
                p.grad.mul_(1.0 / (scale * max(clip, 1.0)))

    def _update_scale(self, overflow):
        if overflow:
            self.cur_scale, self.last_overflow = max(self.cur_scale / 2, self.min_scale), self.cur_iter
        elif (self.cur_iter - self.last_overflow) % self.scale_window == 0:
            self.cur_scale *= 2
        self.cur_iter += 1

    def zero_grad(self):
        for group in self.fp16_groups:
            for p in group:
                p.grad = None


class Engine:
    def __init__(self, module):
        self.module = module.half()
        self.optimizer = FP16UnfusedOptimizer(Lamb(module.parameters()))

    def get_global_grad_norm(self):
        return self.optimizer._global_grad_norm


model = Bert()
watch(model)
engine = Engine(model)
gen = torch.Generator().manual_seed(104)
for step in range(100):
    start, stride = torch.randint(1, VOCAB, (16, 1), generator=gen), torch.randint(1, 4, (16, 1), generator=gen)
    ids = (start + stride * torch.arange(SEQ)) % (VOCAB - 1) + 1
    hidden = torch.rand(ids.shape, generator=gen) < 0.2
    logits = engine.module(ids.masked_fill(hidden, MASK))
    loss = F.cross_entropy(logits[hidden].float(), ids[hidden])
    engine.optimizer.backward(loss)
    engine.optimizer.step()
    if (step + 1) % 10 == 0:
        print(f"step={step + 1}, skipped={engine.optimizer.skipped}, loss={loss.item():.4f}, grad_norm={engine.get_global_grad_norm():.2f}, loss_scale={engine.optimizer.cur_scale:g}")
