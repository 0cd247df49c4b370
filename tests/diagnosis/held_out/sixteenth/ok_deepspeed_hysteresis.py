"""Fine-tuning with half-precision weights and a loss scaler with hysteresis, written after DeepSpeed's."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(15)


class DynamicLossScaler:
    def __init__(self, init_scale=2.0 ** 24, scale_window=40, hysteresis=2, min_scale=1.0):
        self.cur_scale, self.scale_window, self.min_scale = init_scale, scale_window, min_scale
        self.delayed_shift, self.cur_hysteresis = hysteresis, hysteresis
        self.cur_iter, self.last_overflow_iter = 0, -1

    def update_scale(self, overflow):
        if overflow:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
                print(f"OVERFLOW! Skipping step. Reducing loss scale to {self.cur_scale:g}")
            else:
                self.cur_hysteresis -= 1
                print(f"OVERFLOW! Skipping step. Reducing hysteresis to {self.cur_hysteresis}")
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= 2
        self.cur_iter += 1


class FP16Engine:
    """Half weights for forward and backward, float32 ones for the optimizer."""

    def __init__(self, module, lr):
        self.module = module.half()
        self.fp16 = [p for p in self.module.parameters()]
        self.fp32 = [p.detach().float().clone().requires_grad_() for p in self.fp16]
        self.optimizer = torch.optim.AdamW(self.fp32, lr=lr)
        self.loss_scaler = DynamicLossScaler()
        self.skipped = 0

    def backward(self, loss):
        (loss * self.loss_scaler.cur_scale).backward()

    def step(self):
        overflow = any(not torch.isfinite(p.grad).all() for p in self.fp16)
        if overflow:
            self.skipped += 1
        else:
            for master, p in zip(self.fp32, self.fp16):
                master.grad = p.grad.float() / self.loss_scaler.cur_scale
            nn.utils.clip_grad_norm_(self.fp32, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                for master, p in zip(self.fp32, self.fp16):
                    p.copy_(master)
        self.loss_scaler.update_scale(overflow)
        for p in self.fp16:
            p.grad = None


class RewardModel(nn.Module):
    def __init__(self, vocab=40, d=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.lstm_in, self.gate = nn.Linear(d, d), nn.Linear(d, d)
        self.norm, self.v_head = nn.LayerNorm(d), nn.Linear(d, 1)

    def forward(self, ids):
        h = self.embed(ids)
        h = torch.tanh(self.lstm_in(h)) * torch.sigmoid(self.gate(h))
        return self.v_head(self.norm(h.mean(1))).squeeze(-1)


def comparisons(gen, n=24, length=12):
    """Of two answers the one with more polite words (0-7) is chosen."""
    a, b = torch.randint(0, 40, (2, n, length), generator=gen)
    better = (a < 8).sum(1) >= (b < 8).sum(1)
    chosen = torch.where(better[:, None], a, b)
    return chosen, torch.where(better[:, None], b, a)


model = RewardModel()
watch(model)
engine = FP16Engine(model, lr=4e-3)
gen = torch.Generator().manual_seed(16)
for step in range(100):
    chosen, rejected = comparisons(gen)
    loss = -F.logsigmoid((engine.module(chosen) - engine.module(rejected)).float()).mean()
    engine.backward(loss)
    engine.step()
    if step % 10 == 0 or step == 99:
        print(f"step={step}, skipped={engine.skipped}, loss={loss.item():.4f}, scale={engine.loss_scaler.cur_scale:g}")
