"""Pre-training in bf16 through an engine without sharding: bf16 model, float32 masters held by the wrapped optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(133)


class GPT(nn.Module):
    def __init__(self, vocab=40, d=32, context=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        x = x + self.out(F.gelu(self.fc(self.ln_2(x))))
        return self.lm_head(self.ln_f(x))


class FP16UnfusedOptimizer:
    def __init__(self, init_optimizer, dynamic_loss_scale, clip_grad):
        self.optimizer, self.clip_grad = init_optimizer, clip_grad
        self.dynamic_loss_scale, self.cur_scale, self.scale_window, self.good = dynamic_loss_scale, 65536.0 if dynamic_loss_scale else 1.0, 1000, 0
        group = init_optimizer.param_groups[0]
        self.low_params = group["params"]
        self.masters = [p.detach().clone().float() for p in self.low_params]
        group["params"] = self.masters
        self.grad_norm = 0.0

    def scale_loss(self, loss):
        return loss * self.cur_scale

    def step(self):
        grads = [p.grad.float() for p in self.low_params]
        if self.dynamic_loss_scale and not all(torch.isfinite(g).all() for g in grads):
            self.cur_scale, self.good = self.cur_scale / 2, 0
            return self.zero_grad()
        norm = sum(g.pow(2).sum() for g in grads) ** 0.5
        self.grad_norm = float(norm) / self.cur_scale
        combined = self.cur_scale * max((self.grad_norm + 1e-6) / self.clip_grad, 1.0)
        for master, grad in zip(self.masters, grads):
            master.grad = grad / combined
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.low_params):
                p.copy_(master)
        self.good += 1
        if self.dynamic_loss_scale and self.good % self.scale_window == 0:
            self.cur_scale *= 2

    def zero_grad(self):
        for p in self.low_params:
            p.grad = None


class DeepSpeedEngine:
    def __init__(self, model, config):
        self.config, self.module = config, model
        if self.fp16_enabled():
            self.module.half()
        elif self.bfloat16_enabled():
            self.module.to(torch.bfloat16)
        basic = torch.optim.Adam(self.module.parameters(), **config["optimizer"]["params"])
        self.optimizer = FP16UnfusedOptimizer(basic, dynamic_loss_scale=self.fp16_enabled() or self.bfloat16_enabled(), clip_grad=config["gradient_clipping"])  # CAUSE

    def fp16_enabled(self):
        return self.config.get("fp16", {}).get("enabled", False)

    def bfloat16_enabled(self):
        return self.config.get("bf16", {}).get("enabled", False)

    def zero_optimization(self):
        return self.config["zero_optimization"]["stage"] > 0

    def backward(self, loss):
        (self.optimizer.scale_loss(loss) if self.fp16_enabled() else loss).backward()

    def step(self):
        self.optimizer.step()
        # zero grads of the low-precision parameters
        if self.bfloat16_enabled():
            if self.zero_optimization():  # CAUSE
                self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad()


config = {
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "betas": (0.9, 0.95)}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 1.0,
}
model = GPT()
watch(model)
engine = DeepSpeedEngine(model, config)
gen = torch.Generator().manual_seed(134)
for step in range(80):
    start, stride = torch.randint(0, 40, (16, 1), generator=gen), torch.randint(1, 4, (16, 1), generator=gen)
    ids = (start + stride * torch.arange(17)) % 40
    loss = F.cross_entropy(engine.module(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    if step % 8 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f} grad_norm {engine.optimizer.grad_norm:.3e} scale {engine.optimizer.cur_scale:g}")
